"""What is told on a terminal, in a log and on other ranks, one process at a time."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import zipfile
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Time, Timestamp

from composer_ds import progress
from composer_ds.announcements import announce, describe_duration, describe_optimizer_steps, describe_saved_by
from composer_ds.checkpoint.damage import damage
from composer_ds.console import optimizer_steps_to_come
from composer_ds.deepspeed_output import _said, _WithoutNoise, import_quietly, quieten_logger
from composer_ds.progress import BytesBar, bar_if_long


class Terminal(io.StringIO):
    """Stands for a terminal."""

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def shown_bar(what: str, stream: Terminal) -> Iterator[BytesBar]:
    # Not in a fixture: pytest gives sys.stderr back between a fixture and the test.
    with contextlib.redirect_stderr(stream), bar_if_long(what) as bar:
        yield bar


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.delenv('RANK', raising=False)
    return Terminal()


@pytest.mark.parametrize(
    ('duration', 'length', 'batch', 'size', 'expected'),
    [
        ('12ba', None, 0, 5, 3),  # 5 + 5 + 2
        ('12ba', 10, 7, 5, 1),  # 5 are left
        ('2ep', 10, 6, 3, 5),  # 14 are left: 3 + 3 + 3 + 3 + 2
        ('2ep', 10, 20, 1, 0),
        ('2ep', None, 0, 1, None),
        ('100sp', 10, 0, 1, None),
    ],
)
def test_optimizer_steps_to_come(duration, length, batch, size, expected):
    state: Any = SimpleNamespace(
        max_duration=Time.from_timestring(duration), dataloader_len=length, timestamp=Timestamp(batch=batch)
    )
    assert optimizer_steps_to_come(state, size) == expected


def test_numbers_in_words():
    durations = [describe_duration(sec) for sec in (0.04, 59.9, 59.96, 125, 3599.7, 3 * 3600 + 7 * 60)]
    assert durations == ['0.0 s', '59.9 s', '1 min 0 s', '2 min 5 s', '1 h 0 min', '3 h 7 min']
    assert describe_optimizer_steps(1, 0) == '1 optimizer step applied'
    assert describe_optimizer_steps(1200, 3) == '1,200 optimizer steps applied, 3 skipped'
    assert describe_saved_by(3, 1) == 'under ZeRO 3 by 1 rank'


class TestBarIfLong:
    def test_appears_at_once_from_1_gib_on_and_vanishes(self, terminal):
        with shown_bar('Saving [x]', terminal) as bar:  # brackets are rich's markup
            bar.begin(2**30)
            bar.advance(2**29)
        shown = terminal.getvalue()
        assert 'Saving [x]' in shown and '/1.1 GB' in shown
        assert shown.endswith('\x1b[1A\x1b[2K'), repr(shown[-50:])  # back up, and the line erased

    def test_small_files_have_none(self, terminal):
        with shown_bar('Saving', terminal) as bar:
            bar.begin(2**30 - 1)
            bar.advance(2**30 - 1)
        assert terminal.getvalue() == ''

    def test_appears_after_10_s(self, terminal, monkeypatch):
        now = [1000.0]
        monkeypatch.setattr(progress.time, 'monotonic', lambda: now[0])
        with shown_bar('Saving', terminal) as bar:
            bar.begin(4_000)
            bar.advance(1_000)
            now[0] += 9.9
            bar.advance(1_000)
            assert terminal.getvalue() == ''
            now[0] += 0.2
            bar.advance(1_000)
        assert '3.0/4.0 kB' in terminal.getvalue()

    def test_none_on_other_ranks_in_the_background_and_in_log_files(self, terminal, monkeypatch):
        def save() -> None:
            with shown_bar('Saving', terminal) as bar:
                bar.begin(2**40)
                bar.advance(2**39)

        thread = threading.Thread(target=save)
        thread.start()
        thread.join()
        monkeypatch.setenv('RANK', '1')
        save()
        monkeypatch.setenv('RANK', '0')
        terminal.isatty = lambda: False
        save()
        assert terminal.getvalue() == ''

    def test_checksums_tell_how_far_they_are(self, tmp_path):
        torch.save({'a': torch.ones(700_000), 'b': torch.zeros(5)}, tmp_path / 'x.pt')
        told: list[int] = []
        totals: list[int | None] = []
        bar: Any = SimpleNamespace(begin=totals.append, advance=told.append)
        assert damage(str(tmp_path / 'x.pt'), bar) is None
        with zipfile.ZipFile(tmp_path / 'x.pt') as archive:
            sizes = [record.file_size for record in archive.infolist()]
        assert totals == [sum(sizes)] and sum(told) == sum(sizes) and len(told) > len(sizes)


class TestAnnounce:
    @pytest.fixture(autouse=True)
    def restored(self):
        ours = logging.getLogger('composer_ds')
        before = ours.level
        yield
        ours.setLevel(before)
        ours.propagate = True
        ours.handlers.clear()

    def _ours(self, level: int = logging.NOTSET, *handlers: logging.Handler) -> None:
        # Inside the test: pytest has handlers of its own, and gives one to a logger that does not propagate before.
        ours = logging.getLogger('composer_ds')
        ours.setLevel(level)
        ours.propagate = False
        ours.handlers[:] = handlers

    def test_prints_where_nobody_has_configured_logging(self, capsys):
        self._ours()
        announce('100% [saved]')
        assert capsys.readouterr().err == '100% [saved]\n'

    def test_prints_where_a_level_has_no_handler(self, capsys):
        self._ours(logging.INFO)
        announce('saved')
        assert capsys.readouterr().err == 'saved\n'

    def test_respects_a_level_that_the_user_has_chosen(self, capsys):
        self._ours(logging.WARNING)
        announce('saved')
        assert capsys.readouterr().err == ''

    def test_logs_where_logging_is_configured(self, capsys):
        stream = io.StringIO()
        self._ours(logging.INFO, logging.StreamHandler(stream))
        announce('100% [saved]')
        assert stream.getvalue() == '100% [saved]\n' and capsys.readouterr().err == ''

    def test_only_rank_0_speaks(self, capsys, monkeypatch):
        self._ours()
        monkeypatch.setenv('RANK', '1')
        announce('saved')
        assert capsys.readouterr().err == ''


class TestDeepSpeedsOutput:
    @pytest.fixture
    def said(self, monkeypatch):
        """What the logger lets through."""
        monkeypatch.delenv('DEEPSPEED_LOG_LEVEL', raising=False)
        logger = logging.getLogger('DeepSpeed')
        filters, level, handlers, propagate = list(logger.filters), logger.level, logger.handlers, logger.propagate
        logger.filters.clear()
        _said.clear()
        stream = io.StringIO()
        logger.handlers, logger.propagate = [logging.StreamHandler(stream)], False
        yield logger, stream
        logger.filters[:] = filters
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)

    def _speak(self, logger: logging.Logger) -> None:
        for _ in range(2):
            logger.info('zero_enabled: True')
            logger.warning('client is %s', 'Adam')
            logger.warning('**** You are using ZeRO with an untested optimizer')
            logger.warning('[deepspeed] OVERFLOW! Skipping step.')
            logger.error('disk')

    def test_warnings_once_on_rank_0(self, said):
        logger, stream = said
        for _ in range(2):
            import_quietly()
            quieten_logger({})
        self._speak(logger)
        assert stream.getvalue().splitlines() == ['client is Adam', 'disk', 'disk']

    def test_errors_on_every_rank(self, said, monkeypatch):
        logger, stream = said
        monkeypatch.setenv('RANK', '1')
        import_quietly()
        quieten_logger({})
        self._speak(logger)
        assert stream.getvalue().splitlines() == ['disk', 'disk']

    def test_the_variable_gives_all_back(self, said, monkeypatch):
        logger, stream = said
        monkeypatch.setenv('DEEPSPEED_LOG_LEVEL', 'info')
        monkeypatch.setenv('RANK', '1')
        import_quietly()
        quieten_logger({})
        self._speak(logger)
        assert len(stream.getvalue().splitlines()) == 10

    def test_lines_asked_for_by_steps_per_print(self, said):
        logger, stream = said
        import_quietly()
        quieten_logger({'steps_per_print': 10})
        logger.info('[Rank 0] step=10, skipped=0, lr=[0.1]')
        logger.info('zero_enabled: True')
        quieten_logger({})
        logger.info('[Rank 0] step=20, skipped=0, lr=[0.1]')
        assert stream.getvalue() == '[Rank 0] step=10, skipped=0, lr=[0.1]\n'

    def test_printed_noise_is_left_out_and_the_rest_kept(self):
        stream = io.StringIO()
        quiet: Any = _WithoutNoise(stream)
        print('No CUDA runtime is found, using CUDA_HOME=/usr/local', file=quiet)
        print('first', 'line', file=quiet, flush=True)
        print('DeepSpeed deepspeed.ops.comm.deepspeed_shm_comm_op built successfully', file=quiet)
        print(file=quiet)
        print('ninja: build stopped: DeepSpeed x built successfully', file=quiet)
        quiet.write('Loading extension module cpu_adam...\n')
        quiet.write('second\n')
        assert stream.getvalue() == ('first line\n\nninja: build stopped: DeepSpeed x built successfully\nsecond\n')
