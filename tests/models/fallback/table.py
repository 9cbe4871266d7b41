"""Print which small random models of transformers' decoders run, and how; or why they do not.

    python -m tests.models.fallback.table [NAME ...]

A line for each variant: what `model.backend: auto` takes, the largest difference of logits from transformers' own in
float32 with `model.backend: transformers`, and what was replaced. Exit code 1 if one differs, or runs that was expected
to be refused.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from specbatch.errors import SpecbatchError
from specbatch.models.formats.checkpoint import open_checkpoint
from specbatch.setup.build import build_decoder
from tests.models.fallback.variants import EQUAL, REFUSED, VOCAB, own_model, small_config, write_model
from tests.oracle.spans import piecewise_logits
from tests.tiny_models import CPU

_PIECES = [1, 130, 7, 150] + [1] * 12


def _line(folder: Path, model_type: str, changes: dict[str, Any]) -> tuple[str, bool]:
    write_model(folder, model_type, changes)
    tokens = torch.randint(3, VOCAB, (sum(_PIECES),), generator=torch.Generator().manual_seed(0)).tolist()
    auto = "native" if open_checkpoint(folder).config.is_native else "transformers"
    checkpoint = open_checkpoint(folder, "transformers")
    with torch.inference_mode():
        expected = own_model(folder)(torch.tensor([tokens])).logits[0]
        decoder: Any = build_decoder(checkpoint.config, checkpoint.tensors, len(tokens), torch.float32, CPU)
        error = float((piecewise_logits(decoder, tokens, _PIECES, torch.float32) - expected).abs().max())
    replaced = ", ".join(f"{count} {kind}" for kind, count in decoder.replaced.items() if count)
    return f"{auto:<13} {error:.0e}  {replaced}", error < 1e-4


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    wanted, wrong = sys.argv[1:], 0
    for name, (model_type, changes, *reason) in {**EQUAL, **REFUSED}.items():  # type: ignore[dict-item]
        if wanted and name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                if reason:  # weights are not asked for
                    small_config(model_type, **changes).save_pretrained(folder)
                    open_checkpoint(Path(folder), "transformers")
                    line, is_right = "runs, and was expected to be refused", False
                else:
                    line, is_right = _line(Path(folder), model_type, changes)
            except SpecbatchError as error:
                why = error.message.partition("transformers: ")[2] or error.message
                line, is_right = f"refused       {why}", bool(reason)
        wrong += not is_right
        print(f"{name:<20} {line}{'' if is_right else '  WRONG'}", flush=True)
    print(f"{wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
