"""What ``composer-ds report`` does."""

from __future__ import annotations

from pathlib import Path

from composer_ds.errors import ConfigError, EnvironmentProblem
from composer_ds.report.checkpoints import checkpoints_of
from composer_ds.report.file_log import find_file_logs, read_file_log
from composer_ds.report.page import page_of
from composer_ds.report.record import RunRecord
from composer_ds.report.wandb_run import find_wandb_files, read_wandb

__all__ = ['read_run', 'run']


def run(folder: Path, out: Path | None, checkpoints: Path | None) -> str:
    """Write the page.

    Args:
        folder (Path): The run's folder, or its file.
        out (Path | None): The page; None for ``report.html`` in the run's folder.
        checkpoints (Path | None): Where the run's checkpoints are; None to look where its configuration says.

    Returns:
        str: What was done.

    Raises:
        ConfigError: There is nothing to read, or the page cannot be written.
        EnvironmentProblem: plotly is missing.
    """
    if checkpoints is not None and not checkpoints.is_dir():
        raise ConfigError(f'--checkpoints {checkpoints}: no such folder')
    record = read_run(folder)
    place = folder if folder.is_dir() else folder.parent
    out = out or place / 'report.html'
    try:
        page = page_of(record, checkpoints_of(record, place, checkpoints))
    except ImportError as error:
        raise EnvironmentProblem(f'The report needs plotly: pip install plotly ({error})') from error
    try:
        out.write_text(page, encoding='utf-8')
    except OSError as error:
        raise ConfigError(f'--out {out}: cannot be written: {error.strerror or error}') from error
    return f'Wrote {out}, about run {record.name} ({record.rows[-1][0]} batches).'


def read_run(folder: Path) -> RunRecord:
    """Find and read a run.

    Args:
        folder (Path): Its folder, or its file.

    Returns:
        RunRecord: The run that was started last.

    Raises:
        ConfigError: There is nothing to read.
    """
    if not folder.exists():
        raise ConfigError(f'RUN_FOLDER {folder}: no such file or folder')
    if folder.is_file():
        record = read_wandb(folder) if folder.suffix == '.wandb' else read_file_log(folder)
        others: list[Path] = []
    elif files := find_wandb_files(folder):
        record = read_wandb(files[-1])
        others = [file for file in files if file.stem != files[-1].stem]
    elif files := find_file_logs(folder):
        record, others = read_file_log(files[-1]), files[:-1]
    else:
        raise ConfigError(
            f'RUN_FOLDER {folder}: there is no run here. A report is made from the files that W&B writes '
            "(wandb/*run-*/*.wandb, of an offline run or an online one) or from the text of Composer's FileLogger "
            '(loggers.file); give the folder that has them, such as loggers.wandb.init_kwargs.dir'
        )
    if not record.rows:
        raise ConfigError(f'RUN_FOLDER {record.sources[-1]}: nothing was logged; the run ended before its first batch')
    if others:
        record.remarks.append(f'The newest of several runs in {folder}; give the folder of another one to see that.')
    return record
