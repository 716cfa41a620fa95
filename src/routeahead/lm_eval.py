"""lm-evaluation-harness on a streamed model: `pip install 'routeahead[lm-eval]'`.

    python -m routeahead.lm_eval --model routeahead \\
        --model_args pretrained=model.gguf,cache_mb=4000,route_ahead=2 --tasks arc_easy

Every logit that is graded comes from a decode, one token a batch, because that is when lossy
settings act: graded as a prefill, as the harness's other models do it, they would all look free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from tqdm import tqdm

from routeahead.engine.llama import Llama
from routeahead.evaluation.grading import last_logits
from routeahead.evaluation.quality import log_softmax

_CONTEXT = 2048  # tokens, unless n_ctx says otherwise or the model was trained on fewer

Request = tuple[Any, list[int], list[int]]
"""Something, the tokens of a context, and those of its continuation."""


@register_model("routeahead")
class RouteAheadLM(TemplateLM):  # type: ignore[misc]
    """The harness's view of a `Llama`. Requests are evaluated one at a time, in their order.

    Attributes:
        llm: the model; its `counters` and `policies` say what was read and committed meanwhile.
    """

    def __init__(
        self,
        pretrained: str | Path | Llama,
        *,
        batch_size: int | str | None = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
        **settings: Any,
    ) -> None:
        """
        Takes a model file or a loaded model.

        Args:
            batch_size, max_batch_size, device: given by the harness, and without effect.
            settings: what `routeahead.Llama` takes.

        Raises:
            RouteAheadError: the model cannot be loaded, see `Llama`.
        """
        super().__init__()
        if isinstance(pretrained, Llama):
            self.llm = pretrained
        else:
            self.llm = Llama(pretrained, cap_context=True, **{"n_ctx": _CONTEXT, **settings})
        self._prompt: list[int] = []  # what the context holds as prefill

    # --- tokens ---

    @property
    def eot_token_id(self) -> int:
        return int(self.llm.token_eos())

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        begin = int(self.llm.token_bos())
        return begin if begin >= 0 else self.eot_token_id

    @property
    def max_length(self) -> int:
        return self.llm.room

    @property
    def tokenizer_name(self) -> str:
        return Path(self.llm.model_path).name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_options: Any
    ) -> list[int]:
        """Tokens of a text. A beginning is added if the model wants one and the text has none."""
        if add_special_tokens is None:
            begin = self._text(self.llm.token_bos())
            add_special_tokens = not (begin and string.startswith(begin))
        tokens: list[int] = self.llm.tokenize(
            string.encode(), add_bos=add_special_tokens, special=True
        )
        return tokens

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The model's own template, as text.

        Raises:
            ValueError: it has none.
        """
        template = self.llm.metadata.get("tokenizer.chat_template")
        if not template:
            raise ValueError(f"{self.llm.model_path}: has no chat template")
        formatter = llama_cpp.llama_chat_format.Jinja2ChatFormatter(
            template,
            bos_token=self._text(self.llm.token_bos()),
            eos_token=self._text(self.llm.token_eos()),
            add_generation_prompt=add_generation_prompt,
        )
        return str(formatter(messages=chat_history).prompt)  # type: ignore[arg-type]

    def _text(self, token: int) -> str:
        """A special token's text; empty if the model has no such token."""
        return self.llm.detokenize([token], special=True).decode() if token >= 0 else ""

    # --- requests ---

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_options: Any
    ) -> list[tuple[float, bool]]:
        answers = []
        for _, context, continuation in tqdm(requests, disable=disable_tqdm):
            whole = (context + continuation)[-self.max_length :]
            graded = min(len(continuation), len(whole) - 1)
            answers.append(self._grade(whole[:-graded], whole[-graded:]))
        return answers

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        sums = []
        for request in tqdm(requests, disable=disable_tqdm):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,
                context_len=1,
            )
            pairs = map(utils.make_disjoint_window, windows)
            sums.append(sum(self._grade(context, graded)[0] for context, graded in pairs))
        return sums

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        texts = []
        for request in tqdm(requests, disable=disable_tqdm):
            context, options = request.args
            options = normalize_gen_kwargs(options)
            stops = handle_stop_sequences(options["until"], self._text(self.eot_token_id))
            limit = min(options["max_gen_toks"], self.max_length - 2)
            prompt = self.tok_encode(context)[-(self.max_length - limit - 1) :]
            self._prompt = []
            made: Any = self.llm.create_completion(
                prompt or [self.prefix_token_id],
                max_tokens=limit,
                stop=[stop for stop in stops if stop],
                temperature=options.get("temperature", 0.0),
            )
            texts.append(str(made["choices"][0]["text"]))
        return texts

    def _grade(self, context: list[int], graded: Iterable[int]) -> tuple[float, bool]:
        """Log-likelihood in nats of the tokens `graded` after `context`, and whether each is the
        likeliest."""
        *prompt, last = context
        self._prefill(prompt)
        total, greedy = 0.0, True
        with self.llm.decoding():
            for token in graded:
                self.llm.eval([last])
                logits = last_logits(self.llm)
                total += float(log_softmax(logits)[token])
                greedy = greedy and int(np.argmax(logits)) == token
                last = token
        return total, greedy

    def _prefill(self, prompt: list[int]) -> None:
        """Makes `prompt` what the context holds. The answers to one question share theirs."""
        llm = self.llm
        memory = llama_cpp.llama_get_memory(llm.ctx)
        kept = len(prompt)
        there = prompt == self._prompt and llm.n_tokens >= kept
        if there and llama_cpp.llama_memory_seq_rm(memory, 0, kept, -1):
            llm.n_tokens = kept
            return
        llm.reset()
        self._prompt = []  # nothing, if the next line fails
        if prompt:
            llm.eval(prompt)
        self._prompt = prompt


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
