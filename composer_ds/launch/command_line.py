"""The command: `composer -n 8 run.py -f FILE.yaml [key=value ...]`.

Order: arguments, YAML, checks, process group, objects, training. Composer and torch are imported only when the YAML
has been read, so that `--help` and typing mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from composer_ds.errors import ComposerDSError, ConfigError
from composer_ds.launch.config_file import read
from composer_ds.launch.problems import suggestion
from composer_ds.launch.ranks import global_rank, local_rank, share_cores, tell_once
from composer_ds.launchers import complete_environment

__all__ = ['main']

DESCRIPTION = 'Train with Composer, under DeepSpeed where the YAML has a section `deepspeed`.'
EXAMPLES = """\
examples:
  composer -n 8 run.py -f yamls/mt5.yaml                          eight ranks on this machine
  composer -n 2 run.py -f yamls/mt5.yaml train.max_duration=1ep deepspeed.zero_stage=3
  python run.py -f yamls/mt5.yaml deepspeed=null                  one process, Composer without DeepSpeed
  composer -n 2 run.py -f yamls/mt5.yaml loggers.wandb=false      without W&B
exit codes: 0 done, 2 wrong command line or YAML, 1 any other error, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a job; called on every rank by the launcher, or once without one.

    Args:
        argv (Sequence[str] | None): The arguments after the script. Default: those of the process.

    Returns:
        int: The exit code. Errors that are no mistake of the user's come through as exceptions.
    """
    started = time.monotonic()
    with_traceback = '--traceback' in (sys.argv[1:] if argv is None else argv)
    try:
        complete_environment()
        arguments = _parse(argv)
        source = read(arguments.file, arguments.overrides)
        note = share_cores()
        from composer_ds.launch.check import check
        from composer_ds.launch.job import run_job

        config = check(source)
        if note and local_rank() == 0:
            print(note, flush=True)
        run_job(config)
    except ComposerDSError as error:
        if with_traceback:
            traceback.print_exc()
        hint = '\n(--traceback shows what led to it)' if error.__cause__ and not with_traceback else ''
        tell_once(f'run.py: error: {error}{hint}')
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    if global_rank() == 0:
        minutes, seconds = divmod(time.monotonic() - started, 60)
        print(f'Finished after {minutes:.0f} min {seconds:.0f} s of wall-clock time.', flush=True)
    return 0


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments like every other wrong setting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f'{message}\nusage: run.py -f FILE.yaml [key=value ...]; run.py --help tells more')


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog='run.py',
        usage='composer -n RANKS run.py -f FILE.yaml [key=value ...]',
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('-f', '--file', action='append', metavar='FILE', help='YAML file of the run')
    parser.add_argument('overrides', nargs='*', metavar='key=value', help='values that replace those of the file')
    parser.add_argument('--traceback', action='store_true', help='show where an error was raised')
    # DeepSpeed's launcher adds it, and the environment says the same.
    parser.add_argument('--local_rank', type=int, help=argparse.SUPPRESS)
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        flags = ['-f', '--file', '--traceback', '--help']
        parser.error(f'unknown argument {unknown[0]!r}{suggestion(unknown[0].partition("=")[0], flags)}')
    if not arguments.file or len(arguments.file) > 1:
        parser.error(f'give exactly one YAML file with -f (given: {arguments.file or "none"})')
    arguments.file = arguments.file[0]
    return arguments
