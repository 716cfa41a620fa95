#!/bin/sh
# Measures what docs/calibration.md says: `benchmarks/calibration.sh BIN FOLDER`, in the repository's
# folder. A step whose file is in FOLDER already is left out, so that it can be interrupted.
set -eu
bin=$1 folder=$2
data=benchmarks/data
text=$data/held-out.txt

# The third model was not trained for the tasks.
battery_of() {
    [ "$1" = third ] || echo "--prompts $data/battery.jsonl --prompt-through-decode"
}

model_of() {
    if [ "$1" = embedded ]; then echo src/routeahead/models/default.gguf; else echo "$data/$1.gguf"; fi
}

for name in embedded second third; do
    model=$(model_of $name)
    [ -f "$model" ] || continue
    if [ ! -f "$folder/$name.calibrated" ]; then
        rm -f "$data/$name.gates.safetensors"
        "$bin/routeahead" calibrate "$model" --text $data/calibration.jsonl --depth 0.5 --depth 1 --depth 2 --depth 4 \
            --out "$data/$name.gates.safetensors" -t 1 > "$folder/$name.calibrated.new"
        mv "$folder/$name.calibrated.new" "$folder/$name.calibrated"
    fi
    [ -f "$folder/$name.json" ] || "$bin/routeahead" eval "$model" --text $text --max-tokens 2000 -t 1 $(battery_of $name) \
        --settings benchmarks/settings/calibration.$name.txt --work "$folder/$name" --json "$folder/$name.json"
done

[ -f "$folder/inflated-quality.json" ] || "$bin/routeahead" eval "$(model_of embedded)" \
    --text $text --max-tokens 2000 -t 1 $(battery_of embedded) \
    --settings benchmarks/settings/inflated.txt --work "$folder/quality" --json "$folder/inflated-quality.json"

[ -f build/inflated.gguf ] || "$bin/python" benchmarks/inflate_model.py "$(model_of embedded)" \
    build/inflated.gguf --gates $data/embedded.gates.safetensors
for name in embedded inflated; do
    model=build/inflated.gguf
    [ $name = inflated ] || model=$(model_of embedded)
    [ -f "$folder/$name-check.json" ] || "$bin/routeahead" eval "$model" --text $text --max-tokens 300 -t 1 \
        --setting "ahead-2:--cache-mb {75%} --route-ahead 2" --json "$folder/$name-check.json"
done
run="$bin/routeahead bench build/inflated.gguf -t 1 --warmup 32 --tokens 64"
[ -f "$folder/inflated-unthrottled.json" ] || $run --passes 3 --json "$folder/inflated-unthrottled.json" \
    --cell "stream: --cache-mb {75%} --forced-tokens benchmarks/data/held-out.ids"
for rho in 0.6 0.9 1.5; do
    if [ ! -f "$folder/inflated-rho-$rho.json" ]; then
        throttle=$("$bin/python" benchmarks/throttle.py "$folder/inflated-unthrottled.json" $rho)
        sed "s/--throttle 500/--throttle $throttle/" benchmarks/cells/inflated.txt > "$folder/inflated.rho-$rho.txt"
        # Written after each run: it is complete when the bench has ended.
        $run --cells "$folder/inflated.rho-$rho.txt" --passes 10 --json "$folder/bench.new"
        mv "$folder/bench.new" "$folder/inflated-rho-$rho.json"
    fi
done

records=
for name in embedded second third embedded-check inflated-check inflated-quality inflated-rho-0.6 inflated-rho-0.9 inflated-rho-1.5; do
    [ ! -f "$folder/$name.json" ] || records="$records $folder/$name.json"
done
"$bin/python" benchmarks/calibration_page.py docs $records
