"""``composer-ds check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from composer_ds.commands.ending import fail, importing
from composer_ds.errors import ComposerDSError, ConfigError

__all__ = ['HELP', 'check']

HELP = """Tell what a run would do, without training: no GPU and no ranks are needed.

Shows who decides each setting and where its value comes from, the batch arithmetic, the memory of each rank under
every ZeRO stage with every offload, and the learning rate over the run. Settings that conflict are listed, all at
once, with exit code 2.

Examples:

- composer-ds check yamls/mt5.yaml -n 8

- composer-ds check yamls/mt5.yaml -n 8 deepspeed.zero_stage=3 train.precision=amp_bf16 --plot lr.png

- composer-ds check ds_config.json -n 64 --parameters 7B --precision amp_bf16 --microbatch-size 2
"""


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
    """Tell what a run would do, without training. Exit codes as in :func:`composer_ds.cli.main`."""
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
        fail(error)


def _check(file: str, overrides: list[str], world_size: int, plot: Path | None, told: dict[str, Any]) -> None:
    from composer_ds.check.kind import is_run_file

    is_run = is_run_file(file)
    given = [name for name, value in told.items() if value is not None]
    if is_run and given:
        raise ConfigError(f'{", ".join(given)}: for a ds_config only; {file} is a run and says it itself')
    if plot is not None and not is_run:
        raise ConfigError(f'--plot {plot}: a ds_config has no learning rates; give the YAML file of a run')
    with importing('Composer and DeepSpeed') as status:
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
