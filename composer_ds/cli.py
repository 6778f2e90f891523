"""The command `composer-ds`. Each subcommand is a function here that hands over to a package of its own."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.status import Status

from composer_ds import __version__
from composer_ds.errors import ComposerDSError, ConfigError

__all__ = ['app', 'main']

_CHECK = """Tell what a run would do, without training: no GPU and no ranks are needed.

Shows who decides each setting and where its value comes from, the batch arithmetic, the memory of each rank under
every ZeRO stage with every offload, and the learning rate over the run. Settings that conflict are listed, all at
once, with exit code 2.

Examples:

- composer-ds check yamls/mt5.yaml -n 8

- composer-ds check yamls/mt5.yaml -n 8 deepspeed.zero_stage=3 train.precision=amp_bf16 --plot lr.png

- composer-ds check ds_config.json -n 64 --parameters 7B --precision amp_bf16 --microbatch-size 2
"""

_CONSOLIDATE = """Write the weights of a checkpoint as safetensors, for inference or publishing.

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

_INSPECT = """Tell what a checkpoint is, from which run, and whether it is complete and undamaged.

CHECKPOINT is a sharded checkpoint, one of DeepSpeed's own, a file of Composer, or a folder of several, which are
listed. Exit code 1 says that something is missing or damaged.

Examples:

- composer-ds inspect ckpts

- composer-ds inspect ckpts/ep3-ba1200 --all

- composer-ds inspect ckpts/latest-rank0.pt --no-verify --json
"""

app = typer.Typer(
    name='composer-ds',
    no_args_is_help=True,
    add_completion=False,
    context_settings={'help_option_names': ['-h', '--help']},
    rich_markup_mode='markdown',
    pretty_exceptions_enable=False,
)


def main() -> NoReturn:
    """Runs the command; the entry point of the package.

    Exit codes: 0 done, 2 wrong command line, settings that conflict or a file that cannot be read, 1 any other error,
    such as a checkpoint that is missing, incomplete or damaged.
    """
    try:
        app()
    except ComposerDSError as error:
        _fail(error)
    sys.exit(0)


def _fail(error: ComposerDSError) -> NoReturn:
    print(f'composer-ds: error: {error}', file=sys.stderr, flush=True)
    sys.exit(2 if isinstance(error, ConfigError) else 1)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f'composer-ds {__version__}')
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option('--version', callback=_print_version, is_eager=True, help='Show the version and exit.')
    ] = False,
) -> None:
    """DeepSpeed for MosaicML Composer: look at runs before and after they are trained."""


@app.command(help=_CHECK, no_args_is_help=True)
def check(
    file: Annotated[
        str, typer.Argument(metavar='FILE', help='The YAML file of a run, or a ds_config as JSON or YAML.')
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar='[key=value]...', help='Values that replace those of the file, as for run.py.'),
    ] = None,
    world_size: Annotated[
        int, typer.Option('-n', '--world-size', min=1, help='Number of ranks, as for `composer -n`.')
    ] = 1,
    plot: Annotated[
        Path | None, typer.Option(metavar='FILE.png', help='Draw the learning rate into this file, too.')
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help='Size of the model, such as 1.3B.', rich_help_panel='For a ds_config')
    ] = None,
    hidden_size: Annotated[
        int | None, typer.Option(min=1, help='Width of the model.', rich_help_panel='For a ds_config')
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(help='adamw (default), adam, sgd, ...', rich_help_panel='For a ds_config')
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help='fp32, amp_bf16 or amp_fp16.', rich_help_panel='For a ds_config')
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help='Samples that each rank takes at a time.', rich_help_panel='For a ds_config'),
    ] = None,
    microbatch_size: Annotated[
        int | None, typer.Option(min=1, help='Samples of a microbatch.', rich_help_panel='For a ds_config')
    ] = None,
) -> None:
    """Tell what a run would do, without training. Exit codes as in :func:`main`."""
    told = {
        '--parameters': parameters,
        '--hidden-size': hidden_size,
        '--optimizer': optimizer,
        '--precision': precision,
        '--batch-size': batch_size,
        '--microbatch-size': microbatch_size,
    }
    try:
        _check(file, overrides or [], world_size, plot, told)
    except ComposerDSError as error:
        _fail(error)


def _check(file: str, overrides: list[str], world_size: int, plot: Path | None, told: dict[str, Any]) -> None:
    from composer_ds.check.kind import is_run_file

    is_run = is_run_file(file)
    given = [name for name, value in told.items() if value is not None]
    if is_run and given:
        raise ConfigError(f'{", ".join(given)}: for a ds_config only; {file} is a run and says it itself')
    if plot is not None and not is_run:
        raise ConfigError(f'--plot {plot}: a ds_config has no learning rates; give the YAML file of a run')
    with Console(stderr=True).status('Importing Composer and DeepSpeed') as status:
        from composer_ds.check.report import print_findings

        if is_run:
            from composer_ds.check.run_file import check_run_file

            findings = check_run_file(file, overrides, world_size, status.update)
        else:
            from composer_ds.check.ds_config_file import Told, check_ds_config_file, number_of_parameters

            options = {name.removeprefix('--').replace('-', '_'): value for name, value in told.items()}
            options['parameters'] = number_of_parameters(told['--parameters']) if told['--parameters'] else None
            options['optimizer'] = options['optimizer'] or 'adamw'
            findings = check_ds_config_file(file, overrides, world_size, Told(**options), status.update)
    console = Console(highlight=False)
    print_findings(findings, console)
    if plot is not None:
        from composer_ds.check.plot import save_picture

        if findings.rates is None:
            raise ConfigError(f'--plot {plot}: the learning rates are not known; see the remarks')
        save_picture(findings.rates, plot, f'Learning rate of {file}')
        console.print(f'Wrote {plot}.')


_Trusted = Annotated[
    bool,
    typer.Option(
        '--trusted', help='Unpickle any class in the checkpoint, which can run any code: only if you know its writer.'
    ),
]


class _Dtype(str, Enum):
    fp32 = 'fp32'
    bf16 = 'bf16'
    fp16 = 'fp16'


@app.command(help=_CONSOLIDATE, no_args_is_help=True)
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
    trusted: _Trusted = False,
) -> None:
    """Write the weights of a checkpoint. Exit codes as in :func:`main`."""
    try:
        with _importing():
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
        _fail(error)


@app.command(help=_INSPECT, no_args_is_help=True)
def inspect(
    checkpoint: Annotated[str, typer.Argument(metavar='CHECKPOINT', help='A file or a folder.')],
    show_all: Annotated[bool, typer.Option('--all', help='List every tensor.')] = False,
    verify: Annotated[bool, typer.Option(help='Read everything and compare it with its checksums.')] = True,
    as_json: Annotated[bool, typer.Option('--json', help='For programs.')] = False,
    trusted: _Trusted = False,
) -> None:
    """Tell what a checkpoint is. Exit codes as in :func:`main`."""
    try:
        with _importing():
            from composer_ds.inspect.terminal import run
        good = run(checkpoint, show_all=show_all, reads=verify, as_json=as_json, trusted=trusted)
    except ComposerDSError as error:
        _fail(error)
    if not good:
        raise typer.Exit(1)


def _importing() -> Status:
    return Console(stderr=True).status('Importing torch')
