#!/usr/bin/env bash
# Compiles llama.cpp's Vulkan backend, against the installed llama-cpp-python and from the source archive of the same
# version, for Mesa's software device, and runs the checks of tests/model/test_device.py on it:
#
#     tests/support/vulkan_device.sh [PYTEST_ARGUMENTS...]
#
# Its kernels are not the CPU's and are fused, so it shows what RPC cannot: that a lossless run does not disturb what a
# device fuses. Needs Debian's cmake, g++, glslc, libvulkan-dev, spirv-headers and mesa-vulkan-drivers, and about half
# an hour the first time; what is built stays in build/device.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
export PYTHONPATH=tests${PYTHONPATH:+:$PYTHONPATH}

folder=$PWD/build/device/$("$PYTHON" -c 'from importlib.metadata import version; print(version("llama-cpp-python"))')
library=$folder/libggml-vulkan.so
if [ ! -e "$library" ]; then
    ggml=$("$PYTHON" -c 'from support import rpc_device; print(rpc_device.source(("",)))')
    # Debian 12's headers do not know the settings of a validation layer, which is not used here; and the archive lacks
    # a file of no interest.
    sed -i '/VkBool32 enable_best_practice/,/layer_setting_info(settings);/d; s/, &layer_setting_info)/)/' \
        "$ggml/src/ggml-vulkan/ggml-vulkan.cpp"
    touch "$ggml/ggml.pc.in"
    nice -n 19 cmake -S "$ggml" -B "$folder/vulkan" -DCMAKE_BUILD_TYPE=Release -DGGML_VULKAN=ON -DGGML_CPU=OFF \
        -DBUILD_SHARED_LIBS=ON -DGGML_BUILD_TESTS=OFF -DGGML_BUILD_EXAMPLES=OFF
    nice -n 19 cmake --build "$folder/vulkan" --target ggml-vulkan -j "${JOBS:-2}"
    cp "$(find "$folder/vulkan" -name 'libggml-vulkan.so*' -type f | head -1)" "$library"
fi

export ROUTEAHEAD_TEST_DEVICE=vulkan
checks=("tests/model/device_checks.py" "tests/model/test_identity.py" "tests/model/test_slot_ids.py"
        "tests/model/test_raw_decode.py")
for layers in all 4; do
    ROUTEAHEAD_TEST_LAYERS=$layers "$PYTHON" -m pytest -q -p support.on_device --timeout 0 "${@:-${checks[@]}}"
done
