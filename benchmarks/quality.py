"""What a dtype or a quantisation costs the packaged model: logits, perplexity, held-out scores.
With ``--wide``, what it costs the logits of random weights of the widths of a 0.6B model.

Logits are compared with those of torch's ops in float32, on text that the training's generators
write from a seed that the training did not have: their error is the root of the mean square of
the difference over that of the float32 logits, centred. Held-out scores are those of the model's
card, on fewer items.
"""

from __future__ import annotations

import bisect
import itertools
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from asyncllm import LLM, EngineConfig
from asyncllm.checkpoint.model_config import ModelConfig
from asyncllm.checkpoint.model_files import resolve_model
from asyncllm.gpu.batch.input_batch import InputBatch
from asyncllm.gpu.batch.step_buffer import make_dummy_batch, step_inputs
from asyncllm.gpu.build import build_model_runner
from benchmarks.common import Report, options

REFERENCE: dict[str, Any] = {"dtype": "float32", "attention_backend": "torch"}
NATIVE: dict[str, Any] = {"attention_backend": "native"}
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", **NATIVE},
    "bfloat16": {"dtype": "bfloat16", **NATIVE},
    "int8, float32 between": {"dtype": "float32", "quantization": "int8", **NATIVE},
    "int8, bfloat16 between": {"dtype": "bfloat16", "quantization": "int8", **NATIVE},
    "int4, float32 between": {"dtype": "float32", "quantization": "int4", **NATIVE},
    "int4, bfloat16 between": {"dtype": "bfloat16", "quantization": "int4", **NATIVE},
}
WIDE = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 16384, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
"""Of Qwen3-0.6B but for the layers, the vocabulary and the context."""


@dataclass(frozen=True)
class Text:
    """A document.

    Attributes:
        token_ids: all of it.
        written: ``[tokens - 1]`` bool, which tokens but the first are the model's to write: it
            was not trained to predict what a user says.
    """

    token_ids: list[int]
    written: Tensor


def texts(characters: int) -> list[Text]:
    """Documents of ``characters`` in all that the training did not see, cut at the context."""
    generators()
    from demo_model import corpus  # pyright: ignore[reportMissingImports]

    path = resolve_model(None)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    context = ModelConfig.from_directory(path).max_position_embeddings
    found = []
    for pieces in corpus.documents("quality", characters):
        encoding = tokenizer.encode("".join(text for text, _ in pieces), add_special_tokens=False)
        ends = list(itertools.accumulate(len(text) for text, _ in pieces))
        starts = [start for start, _ in encoding.offsets[1:context]]
        written = [pieces[bisect.bisect_right(ends, start)][1] for start in starts]
        found.append(Text(encoding.ids[:context], torch.tensor(written, dtype=torch.bool)))
    return found


def generators() -> None:
    """Makes the training's generators importable: they are no part of the package."""
    folder = str(Path(__file__).parent.parent / "tools")
    if folder not in sys.path:
        sys.path.insert(0, folder)


def teacher_forced_logits(
    found: list[Text], model: ModelConfig | None = None, **settings: Any
) -> list[Tensor]:
    """Logits ``[tokens - 1, vocab_size]`` float32 of each text, in one step each."""
    model = model or ModelConfig.from_directory(resolve_model(None))
    config = EngineConfig(device="cpu", num_threads=2, num_blocks=64, max_num_seqs=1, **settings)
    runner = build_model_runner(config, model)
    state = runner._require_runner()
    batch = InputBatch(1, runner.info.max_model_len, runner.info.kv_groups)
    logits = []
    with torch.inference_mode():
        for text in found:
            count = len(text.token_ids) - 1
            batch.token_ids[0, :count] = text.token_ids[:-1]
            for table in batch.tables:
                table.num_blocks[0] = 0
                table.append(0, list(range(1, 2 + count // table.block_size)))
            inputs = step_inputs(make_dummy_batch([0], [count]), batch, torch.device("cpu"))
            inputs = replace(inputs, output_indices=torch.arange(count), num_logits=count)
            logits.append(state.model.forward(inputs, state.cache).logits.float())
    runner.close()
    return logits


def perplexity(found: list[Text], logits: list[Tensor]) -> float:
    """Of the tokens that are the model's to write."""
    losses = [
        F.cross_entropy(own.double(), torch.tensor(text.token_ids[1:]), reduction="none")
        for text, own in zip(found, logits, strict=True)
    ]
    written = torch.cat([text.written for text in found])
    return float(torch.cat(losses)[written].mean().exp())


def logit_error(expected: list[Tensor], logits: list[Tensor]) -> tuple[float, float]:
    """The relative error, and the share of positions with the same most likely token."""
    wanted, had = torch.cat(expected).double(), torch.cat(logits).double()
    wanted -= wanted.mean(1, keepdim=True)
    had -= had.mean(1, keepdim=True)
    error = ((wanted - had).square().mean() / wanted.square().mean()).sqrt()
    return float(error), float((wanted.argmax(1) == had.argmax(1)).double().mean())


def examine(report: Report, name: str, count: int, **settings: Any) -> None:
    """Held-out scores over all skills."""
    generators()
    from demo_model import heldout  # pyright: ignore[reportMissingImports]

    with LLM(device="cpu", num_threads=2, max_num_seqs=64, **settings) as llm:

        def answer(prompts: list[str]) -> list[str]:
            results = llm.generate(prompts, temperature=0.0, max_tokens=heldout.LONGEST)
            return [result.text for result in results]

        scores = [heldout.score(skill, answer, count) for skill in sorted(heldout.MAKERS)]
    right, total = sum(score.right for score in scores), sum(score.total for score in scores)
    report.add(f"{name}: held-out items right", 100 * right / total, "%", f"of {total}")


def compare_wide(report: Report) -> None:
    """Logits of random weights on random tokens."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(WIDE))
        model = ModelConfig.from_directory(Path(folder))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.vocab_size, (4, 65), generator=generator).tolist()
    found = [Text(own, torch.ones(64, dtype=torch.bool)) for own in ids]
    expected = teacher_forced_logits(found, model, load_format="dummy", **REFERENCE)
    report.section("256 random tokens, random weights of hidden size 1,024 in 8 layers")
    for name, settings in VARIANTS.items():
        logits = teacher_forced_logits(found, model, load_format="dummy", **settings)
        error, same = logit_error(expected, logits)
        report.add(f"{name}: error of the logits", 100 * error, "%")
        report.add(f"{name}: the same most likely token", 100 * same, "%")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--wide", action="store_true", help="random weights of a 0.6B model's widths"
    )
    arguments = parser.parse_args()
    if arguments.wide:
        report = Report("Quality by dtype and quantisation, random weights")
        compare_wide(report)
        report.write(arguments.json)
        return
    found = texts(20_000 if arguments.quick else 200_000)
    report = Report("Quality by dtype and quantisation, packaged model")
    expected = teacher_forced_logits(found, **REFERENCE)
    report.section(f"{sum(len(logits) for logits in expected)} tokens of {len(found)} texts")
    report.add("torch, float32: perplexity", perplexity(found, expected), "")
    for name, settings in VARIANTS.items():
        logits = teacher_forced_logits(found, **settings)
        error, same = logit_error(expected, logits)
        report.add(f"{name}: error of the logits", 100 * error, "%")
        report.add(f"{name}: the same most likely token", 100 * same, "%")
        report.add(f"{name}: perplexity", perplexity(found, logits), "")
        examine(report, name, 10 if arguments.quick else 100, **settings)
    report.write(arguments.json)


if __name__ == "__main__":
    main()
