"""The same weights in a sharded checkpoint and in one of DeepSpeed's own. Runs inside rank processes."""

from __future__ import annotations

from typing import Any

from composer_ds.callbacks.sharded_checkpoint_saver import ShardedCheckpointSaver
from tests.benchmarks.saving_cases import _trainer
from tests.distributed.parity_cases import STRATEGIES


def save(folder: str, strategy: str, layers: int, width: int) -> None:
    """Train a batch under AdamW and save it twice."""
    saver = ShardedCheckpointSaver(f'{folder}/sharded', interval='1ba')
    trainer = _trainer(STRATEGIES[strategy], layers, width, callbacks=[saver])
    trainer.fit(duration='1ba')
    model: Any = trainer.state.model
    model._ds_engine.save_checkpoint(f'{folder}/deepspeed')
    trainer.close()
