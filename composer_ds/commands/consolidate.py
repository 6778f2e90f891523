"""``composer-ds consolidate``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from composer_ds.commands.ending import Trusted, fail, importing
from composer_ds.errors import ComposerDSError

__all__ = ['HELP', 'consolidate']

HELP = """Write the weights of a checkpoint as safetensors, for inference or publishing.

CHECKPOINT is a sharded checkpoint, one of DeepSpeed's own or a file of Composer, or a folder with `latest`; of any ZeRO
stage and world size. Neither a GPU nor ranks are needed, and little memory, whatever the size of the model. Weights
that were trained are the fp32 master weights, unless --dtype says otherwise. With a Hugging Face model, OUT gets its
config.json and tokenizer, so that `from_pretrained(OUT)` works. Where OUT ends in .pt, one file is written for
`Trainer(load_path=OUT, load_weights_only=True)`.

Examples:

- composer-ds consolidate ckpts/ep3-ba1200 weights

- composer-ds consolidate ckpts weights-bf16 --dtype bf16 --max-shard-size 2GB

- composer-ds consolidate deepspeed_run/global_step500 weights.pt
"""


class _Dtype(str, Enum):
    fp32 = 'fp32'
    bf16 = 'bf16'
    fp16 = 'fp16'


def consolidate(
    checkpoint: Annotated[str, typer.Argument(metavar='CHECKPOINT', help='A file or a folder.')],
    out: Annotated[str, typer.Argument(metavar='OUT', help='A folder, or a file whose name ends in .pt.')],
    dtype: Annotated[
        _Dtype | None, typer.Option(help='Of all parameters; buffers keep theirs. Default: as stored.')
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar='SIZE', help='Of each safetensors file, such as 500MB.')
    ] = '5GB',
    overwrite: Annotated[bool, typer.Option('--overwrite', help='Replace weights that are there already.')] = False,
    trusted: Trusted = False,
) -> None:
    """Write the weights of a checkpoint. Exit codes as in :func:`composer_ds.cli.main`."""
    try:
        with importing('torch'):
            from composer_ds.consolidate.report import run
        run(
            checkpoint,
            out,
            dtype=dtype.value if dtype else None,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            trusted=trusted,
        )
    except ComposerDSError as error:
        fail(error)
