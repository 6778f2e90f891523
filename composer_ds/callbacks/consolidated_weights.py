"""``ConsolidatedWeightsSaver``: weights for everyone else, in safetensors, written while they are gathered."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

from composer import Callback
from composer.core import Event, State, Time
from composer.loggers import Logger
from composer.utils import (
    create_interval_scheduler,
    dist,
    format_name_with_dist,
    format_name_with_dist_and_time,
    parse_uri,
)

from composer_ds.announcements import announce_saved
from composer_ds.checkpoint.export import Export
from composer_ds.checkpoint.exported_weights import DTYPES
from composer_ds.checkpoint.folder import tidy_up_folders
from composer_ds.checkpoint.safetensors_stream import layout_of
from composer_ds.checkpoint.uploading import UploadTarget
from composer_ds.errors import ConfigError

__all__ = ['ConsolidatedWeightsSaver']


class ConsolidatedWeightsSaver(Callback):
    """Exports the weights of the model, for inference or publishing, as a folder of safetensors files.

    The tensors are fp32 master weights, or cast to 16 bits, whatever the ZeRO stage and the precision of training. Rank
    0 writes them while they arrive, and holds no more than a few dozen MiB of them. Works without ``DeepSpeed``, too.

    - A Hugging Face model (``composer.models.HuggingFaceModel``) is read by ``AutoModel...from_pretrained(folder)``:
      ``config.json``, the generation configuration and the tokenizer are there.
    - Of a PEFT model the active adapter is exported, for ``PeftModel.from_pretrained(base_model, folder)``.
    - Any other is read by ``safetensors.torch.load_model`` or ``load_file``. Tied weights are stored once, and the
      header names their other names.

    Args:
        folder (str): Where exports are made, with Composer's placeholders, such as ``'weights/{run_name}'``; or the URI
            of an object store (``'s3://bucket/path'``). Default: ``'{run_name}/weights'``.
        interval (str | int | Time | Callable[[State, Event], bool]): When, as ``save_interval`` of Composer's Trainer.
            The end of training is included. Default: ``'1ep'``.
        dtype (str): ``'fp32'``, ``'bf16'`` or ``'fp16'``, for parameters; buffers keep theirs. Default: ``'fp32'``.
        max_shard_size (str | int): The size of a file, such as ``'5GB'``, or bytes. Default: ``'5GB'``.
        filename (str): The name of an export below ``folder``, with Composer's placeholders. Default:
            ``'ep{epoch}-ba{batch}'``.
        num_to_keep (int): How many exports of this run remain, counting those before it was resumed; -1 for all. Those
            in an object store all remain. Default: -1.
        overwrite (bool): Whether to replace an export of the same name, as a resumed run does. Default: True.

    Raises:
        ConfigError: When an argument is wrong.
    """

    def __init__(
        self,
        folder: str = '{run_name}/weights',
        interval: str | int | Time | Callable[[State, Event], bool] = '1ep',
        dtype: str = 'fp32',
        max_shard_size: str | int = '5GB',
        filename: str = 'ep{epoch}-ba{batch}',
        num_to_keep: int = -1,
        overwrite: bool = True,
    ):
        self.folder = str(folder)
        problems = _problems_of(self.folder, dtype, max_shard_size, filename, num_to_keep)
        try:
            self.save_interval: Any = interval if callable(interval) else create_interval_scheduler(interval)
        except (ValueError, TypeError, NotImplementedError) as error:
            problems.append(f"interval={interval!r}: {error}; write '1ep' or '500ba', say")
        if problems:
            raise ConfigError([f'ConsolidatedWeightsSaver({problem})' for problem in problems])
        self.dtype = dtype
        self.max_shard_size = max_shard_size
        self.filename = filename
        self.num_to_keep = num_to_keep
        self.overwrite = overwrite
        self.saved: list[str] = []
        """The exports of this run that remain, the newest last. Alike on all ranks."""
        self.last_saved: str | None = None
        """The newest export of this run."""
        self._saved_at = -1
        self._target: UploadTarget | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        """Find the object store, and tidy up after processes that were killed. Called by Composer, on every rank.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.

        Raises:
            ConfigError: On every rank, when Composer's FSDP partitions the model.
        """
        self._prepare(state)
        folder = format_name_with_dist(self.folder, state.run_name)
        if self._target is None and dist.get_global_rank() == 0:
            tidy_up_folders(folder, self.filename)

    def _prepare(self, state: State) -> None:
        if state.fsdp_enabled:
            raise ConfigError(
                'ConsolidatedWeightsSaver exports what DeepSpeed partitions, or what every rank holds whole. This '
                "model is partitioned by Composer's FSDP: use DeepSpeed(zero_stage=3) instead, or no such callback"
            )
        if self._target is None and parse_uri(self.folder)[0]:
            self._target = UploadTarget(format_name_with_dist(self.folder, state.run_name))

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save when it is time. Called by Composer after every batch, on every rank. Collective when it saves.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self._save_if_due(state, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save when it is time. Called by Composer after every epoch, on every rank. Collective when it saves.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self._save_if_due(state, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Save when it is time. Called by Composer after every iteration, on every rank. Collective when it saves.

        Args:
            state (State): Composer's state.
            logger (Logger): Composer's logger.
        """
        self._save_if_due(state, Event.ITERATION_CHECKPOINT)

    def _save_if_due(self, state: State, event: Event) -> None:
        if self.save_interval(state, event) and self._saved_at != state.timestamp.batch.value:
            self.save(state)

    def save(self, state: State) -> str:
        """Export the weights now; between two batches.

        Collective: every rank calls it.

        Args:
            state (State): Composer's state: ``trainer.state``.

        Returns:
            str: The folder, or its URI.

        Raises:
            CheckpointError: On every rank, when rank 0 could not write. Older exports are intact, and nothing of this
                one remains.
        """
        started = time.monotonic()
        self._prepare(state)
        name = format_name_with_dist_and_time(self.filename, state.run_name, state.timestamp)
        export = Export(format_name_with_dist(self.folder, state.run_name), name, self._target, self.overwrite)
        size_bytes = export.write(state.model, self.dtype, self.max_shard_size)
        self._saved_at = state.timestamp.batch.value
        if self._target is None:
            self._rotate(export.place)
        self.last_saved = f'{export.place} (batch {self._saved_at}, weights in {self.dtype})'
        announce_saved(f'the weights in {self.dtype},', export.place, self._saved_at, size_bytes, started)
        return export.place

    def _rotate(self, newest: str) -> None:
        self.saved = [path for path in self.saved if path != newest] + [newest]
        if self.num_to_keep < 0:
            return
        for path in self.saved[: -self.num_to_keep]:
            if dist.get_global_rank() == 0:
                shutil.rmtree(path, ignore_errors=True)
        self.saved = self.saved[-self.num_to_keep :]

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run has to know, for Composer's checkpoint.

        Returns:
            dict[str, Any]: The exports that remain.
        """
        return {'saved': list(self.saved)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up the exports of the run that is resumed.

        Args:
            state (dict[str, Any]): From :meth:`state_dict`.
        """
        self.saved = list(state['saved'])


def _problems_of(folder: str, dtype: str, max_shard_size: str | int, filename: str, num_to_keep: int) -> list[str]:
    problems = []
    if dtype not in DTYPES:
        problems.append(f'dtype={dtype!r}: one of {", ".join(map(repr, DTYPES))}')
    try:
        layout_of([('any', (1,), DTYPES['fp32'])], max_shard_size)
    except (ValueError, TypeError) as error:
        problems.append(f"max_shard_size={max_shard_size!r}: {error}; write '5GB' or a number of bytes")
    if '/' in filename or 'rank}' in filename or filename.startswith('.') or not filename:
        problems.append(
            f"filename={filename!r}: the name of one folder for all ranks, without '/' and {{rank}}; write "
            "'ep{epoch}-ba{batch}', and put the rest into folder"
        )
    if num_to_keep < -1 or num_to_keep == 0:
        problems.append(f'num_to_keep={num_to_keep}: -1 for all, or 1 and more: the newest is never removed')
    elif num_to_keep > 0 and parse_uri(folder)[0]:
        problems.append(f'num_to_keep={num_to_keep}: nothing is removed from {folder}; leave it at -1')
    return problems
