"""What composer_ds.checkpoint relies on in Composer, and the class that a saver is given."""

from __future__ import annotations

import hashlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
from composer.callbacks import CheckpointSaver
from composer.core import Callback
from composer.utils import checkpoint

from composer_ds.checkpoint import save_safely
from composer_ds.checkpoint.saver import SafeCheckpointSaver

READ_AGAIN = {
    # saver.py does the same around another way of writing; writing.py joins the barrier after the file is written.
    CheckpointSaver._save_checkpoint: '2f1b5899b0e3',
    CheckpointSaver._rotate_checkpoints: 'fc52677b6d4f',
    checkpoint._save_checkpoint: 'd1acbd0a8dc8',
    # verification.py is called by them, between their barriers, on every rank where nothing failed before.
    checkpoint._ensure_valid_checkpoint: '9dbac3c0bc24',
    checkpoint.download_checkpoint: '89aee44e9b52',
    checkpoint._restore_checkpoint: '8f9adedb285a',
}


@pytest.mark.parametrize('function', READ_AGAIN, ids=lambda function: function.__qualname__)
def test_composers_own_code_is_what_ours_was_written_beside(function):
    """When it fails: read the change in Composer, do the same in composer_ds/checkpoint, and note the new value."""
    assert hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:12] == READ_AGAIN[function]


class Mine(CheckpointSaver):
    """A user's saver that does something after each save."""

    def _save_checkpoint(self, state, logger):
        super()._save_checkpoint(state, logger)


def test_a_saver_keeps_its_name_and_what_the_user_overrides(tmp_path):
    plain, mine, other = CheckpointSaver(str(tmp_path)), Mine(str(tmp_path)), Callback()
    state: Any = SimpleNamespace(callbacks=[plain, other, mine], run_name='run')
    undo = save_safely(state)
    assert isinstance(plain, SafeCheckpointSaver) and isinstance(mine, SafeCheckpointSaver) and isinstance(mine, Mine)
    assert [type(saver).__qualname__ for saver in (plain, mine)] == ['CheckpointSaver', 'Mine']
    calls = [cls.__qualname__ for cls in type(mine).__mro__ if '_save_checkpoint' in vars(cls)]
    assert calls == ['Mine', 'SafeCheckpointSaver', 'CheckpointSaver']
    assert type(other) is Callback
    undo()
    assert type(plain) is CheckpointSaver and type(mine) is Mine
