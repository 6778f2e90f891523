"""What is wrong with a checkpoint file: pure functions over files.

``torch.save`` writes a zip archive with a CRC-32 of every record, which ``torch.load`` never looks at: a flipped bit
in a tensor loads without a word.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile

import torch

from composer_ds.progress import BytesBar

__all__ = ['damage', 'identity', 'newest_complete']

_ZIP = b'PK\x03\x04'
_IS_FOLDER = 0x10
_BLOCK_BYTES = 2**20
# What torch wrote before 1.6: a pickle of its magic number, 0x1950A86A20F9469CFC6C. It holds no checksums.
_BEFORE_TORCH_1_6 = b'\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.'


def damage(path: str, bar: BytesBar | None = None) -> str | None:
    """Read a whole checkpoint file, and compare every record with its checksum.

    Args:
        path (str): The file, not compressed.
        bar (BytesBar | None): To be told how far it is. Default: none.

    Returns:
        str | None: What is wrong, as the end of a sentence that the file's name begins; None for a file that is
            complete.
    """
    try:
        size_bytes = os.path.getsize(path)
        if size_bytes == 0:
            return 'is empty (0 bytes)'
        with open(path, 'rb') as file:
            start = file.read(len(_BEFORE_TORCH_1_6))
        if start == _BEFORE_TORCH_1_6:
            return None
        if not start.startswith(_ZIP):
            return (
                f'does not begin as a checkpoint of torch does ({start[:4].hex(" ")} instead of {_ZIP.hex(" ")}); a '
                'compressed one is known by its name, which ends in .pt.gz, say (give save_latest_filename that end, '
                'too)'
            )
        if not zipfile.is_zipfile(path):
            return f'is truncated: it ends after {size_bytes:,} bytes, without the list of its records'
        # What torch.load opens: it finds faults in the list of records that zipfile passes over.
        names = torch._C.PyTorchFileReader(path).get_all_records()  # pyright: ignore[reportAttributeAccessIssue]
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            # Two of one name: testzip() would read one twice. Marked as a folder: torch (2.7) would read nothing, and
            # leave the tensor as the memory happened to be.
            if (
                [record.filename.partition('/')[2] for record in records] != names
                or len(set(names)) < len(names)
                or any(record.external_attr & _IS_FOLDER for record in records)
            ):
                return 'is damaged: its list of records contradicts itself'
            # Nothing to compare with, after torch.serialization.set_crc32_options(False).
            broken = _first_broken(archive, bar) if any(record.CRC for record in records) else None
    # A flipped bit in the list of records makes zipfile raise almost anything.
    except Exception as error:
        return f'cannot be read: {type(error).__name__}: {error}'
    return None if broken is None else f'is damaged: the record {broken!r} does not match its checksum'


def _first_broken(archive: zipfile.ZipFile, bar: BytesBar | None) -> str | None:
    """Do what ``ZipFile.testzip`` does, and tell how far it is."""
    records = archive.infolist()
    if bar is not None:
        bar.begin(sum(record.file_size for record in records))
    for record in records:
        try:
            with archive.open(record.filename) as file:
                while block := file.read(_BLOCK_BYTES):
                    if bar is not None:
                        bar.advance(len(block))
        except zipfile.BadZipFile:
            return record.filename
    return None


def identity(path: str) -> str:
    """Tell two checkpoints apart, without reading them: by the list of records with their checksums.

    Args:
        path (str): The file.

    Returns:
        str: Alike for files with the same content.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            records = [(record.filename, record.file_size, record.CRC) for record in archive.infolist()]
    except Exception:  # written before torch 1.6; or damaged, which somebody else tells
        return str(os.path.getsize(path))
    return hashlib.sha256(repr(records).encode()).hexdigest()


def newest_complete(path: str) -> str | None:
    """Find the newest complete checkpoint beside a damaged one: of the same name, but for the numbers in it.

    Args:
        path (str): The damaged file.

    Returns:
        str | None: The name of the file in the same folder with the highest numbers that is not damaged, if any.
    """
    folder, name = os.path.split(path)
    alike = re.compile(r'\d+'.join(re.escape(part) for part in re.split(r'\d+', name)))
    others = [other for other in os.listdir(folder or '.') if alike.fullmatch(other) and other != name]
    others.sort(key=lambda other: [int(number) for number in re.findall(r'\d+', other)], reverse=True)
    return next((other for other in others if damage(os.path.join(folder, other)) is None), None)
