"""What is found in damaged files. The oracle is torch.load: what is let through loads equal content."""

from __future__ import annotations

import io
import pickle
import random
import warnings

import pytest
import torch

from composer_ds.checkpoint.damage import damage, newest_complete

CONTENT = {'weights': torch.arange(40, dtype=torch.float32), 'ids': torch.arange(5), 'epoch': 3, 'name': 'a run'}


def _equal(found) -> bool:
    return found.keys() == CONTENT.keys() and all(
        torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        for name, value in CONTENT.items()
    )


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / 'ep0-ba12-rank0.pt'
    torch.save(CONTENT, path)
    assert damage(str(path)) is None
    return path


def test_a_flipped_bit_is_found_or_changes_nothing(saved):
    good = saved.read_bytes()
    generator = random.Random(3)
    found, loaded_wrongly_by_torch = 0, 0
    everywhere = [(place, bit) for place in range(len(good)) for bit in range(8)]
    entry = good.rindex(b'PK\x01\x02', 0, good.rindex(b'/data/0'))  # of a tensor, in the list of records
    flips = generator.sample(everywhere, 600) + [flip for flip in everywhere if entry <= flip[0] < entry + 70]
    flips += generator.sample([flip for flip in everywhere if flip[0] >= good.index(b'PK\x06\x06')], 200)
    for place, bit in flips:
        bad = bytearray(good)
        bad[place] ^= 1 << bit
        saved.write_bytes(bad)
        finding = damage(str(saved))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter('ignore')
                equal = _equal(torch.load(io.BytesIO(bad), weights_only=False))
        except Exception:
            equal = None
        assert finding is not None or equal is True, (place, bit, equal)
        found += finding is not None
        loaded_wrongly_by_torch += equal is False
    # The check is needed, and does more than say no.
    assert loaded_wrongly_by_torch > 20
    assert found < len(flips)


def test_a_truncated_file_is_found_wherever_it_ends(saved):
    good = saved.read_bytes()
    for size_bytes in range(0, len(good), 9):
        saved.write_bytes(good[:size_bytes])
        assert damage(str(saved)) is not None, size_bytes
    saved.write_bytes(good[:-100])
    assert f'truncated: it ends after {len(good) - 100:,} bytes' in str(damage(str(saved)))
    saved.write_bytes(b'')
    assert damage(str(saved)) == 'is empty (0 bytes)'


def test_the_finding_names_the_record(saved):
    good = saved.read_bytes()
    place = good.index(CONTENT['weights'].numpy().tobytes()) + 21
    saved.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
    assert "the record 'ep0-ba12-rank0/data/0' does not match its checksum" in str(damage(str(saved)))


def test_files_that_have_no_checksums_pass(saved):
    torch.save(CONTENT, saved, _use_new_zipfile_serialization=False)
    assert damage(str(saved)) is None
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(CONTENT, saved)
    finally:
        torch.serialization.set_crc32_options(True)
    assert damage(str(saved)) is None
    saved.write_bytes(saved.read_bytes()[:-200])
    assert 'truncated' in str(damage(str(saved)))


def test_what_is_no_checkpoint_is_refused(saved):
    saved.write_bytes(pickle.dumps(CONTENT['epoch']))
    assert 'does not begin as a checkpoint' in str(damage(str(saved)))
    assert 'FileNotFoundError' in str(damage(str(saved.with_name('absent.pt'))))


def test_the_newest_complete_one_is_found_by_its_numbers(saved):
    for batch in (2, 9, 10, 11):
        torch.save(CONTENT, saved.with_name(f'ep0-ba{batch}-rank0.pt'))
    for other in ('weights-ba30.pt', '.incomplete-ep0-ba31-rank0.pt', 'latest-rank0.pt'):
        torch.save(CONTENT, saved.with_name(other))
    newer = saved.with_name('ep0-ba11-rank0.pt')
    newer.write_bytes(newer.read_bytes()[:-1])
    assert newest_complete(str(saved)) == 'ep0-ba10-rank0.pt'
    assert newest_complete(str(saved.with_name('latest-rank0.pt'))) is None
