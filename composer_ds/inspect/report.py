"""Showing what is known about a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, Group
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from composer_ds.checkpoint.source import StoredTensor
from composer_ds.inspect.findings import Findings, Listed, dtype_name, weights_bytes

__all__ = ['print_findings', 'print_list']

_FIRST, _LAST = 10, 5
"""How many tensors are shown of a long list."""


def print_findings(findings: Findings, console: Console, show_all: bool = False) -> None:
    """Print everything about one checkpoint.

    Args:
        findings (Findings): What is known.
        console (Console): Where to.
        show_all (bool): Whether to list every tensor. Default: False.
    """
    source = findings.source
    facts = {'format': source.format, **source.facts}
    _section(console, str(source.path), _pairs((name, _in_words(value)) for name, value in facts.items()))
    tensors = list(source.tensors.values())
    parts: list[Any] = [_tensor_table(tensors, source.tied, show_all)]
    left_out = len(tensors) - _FIRST - _LAST
    if left_out > 0 and not show_all:
        parts.append(Text(f'{left_out} more tensors are shown with --all.', style='dim'))
    _section(console, 'Tensors', *parts)
    _section(console, 'In all', _pairs(_totals(findings)))
    _section(console, 'Files', *_verdict(findings))


def print_list(listed: list[Listed], folder: str, console: Console) -> None:
    """Print what is known about a folder of checkpoints.

    Args:
        listed (list[Listed]): The checkpoints.
        folder (str): The folder, in the user's spelling.
        console (Console): Where to.
    """
    table = _table('', 'checkpoint', 'epoch', 'batch', 'format', 'size', 'complete', right=('epoch', 'batch', 'size'))
    for one in listed:
        source = one.findings.source if one.findings is not None else None
        facts = source.facts if source is not None else {}
        verdict = 'being written' if one.is_unfinished else 'no' if one.problem else 'yes'
        table.add_row(
            Text('>' if one.is_latest else ''),
            Text(one.path.name),
            Text(str(facts.get('epoch', '-'))),
            Text(str(facts.get('batch', '-'))),
            Text(source.format if source is not None else '-'),
            Text(decimal(one.size_bytes)),
            Text(verdict, style='' if not one.problem else 'dim' if one.is_unfinished else 'red'),
        )
    notes = [f'{one.path.name}: {one.problem}' for one in listed if one.problem and not one.is_unfinished]
    if any(one.is_unfinished for one in listed):
        notes.append('being written: has the temporary name of a save, which goes on or was killed.')
    if any(one.is_latest for one in listed):
        notes.append('> is the latest.')
    notes.append('Checksums were not looked at: give one of the checkpoints for that.')
    title = f'{len(listed)} checkpoint{"s" if len(listed) > 1 else ""} in {folder}'
    _section(console, title, table, *(Text(note) for note in notes))


def _section(console: Console, title: str, *parts: Any) -> None:
    console.print(Text(title, style='bold', overflow='fold'))
    console.print(Padding(Group(*parts), (0, 0, 1, 2), expand=False))


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, header_style='underline', pad_edge=False)
    for name in columns:
        table.add_column(name, overflow='fold', justify='right' if name in right else 'left', no_wrap=name in right)
    return table


def _pairs(pairs: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow='fold')
    for name, value in pairs:
        table.add_row(Text(name), Text(value))
    return table


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ', '.join(f'{name} {_in_words(inner)}' for name, inner in value.items()) or 'none'
    if isinstance(value, (list, tuple)):
        return ', '.join(_in_words(inner) for inner in value) or 'none'
    if isinstance(value, int) and not isinstance(value, bool):
        return f'{value:,}'
    return 'none' if value is None else str(value)


def _tensor_table(tensors: list[StoredTensor], tied: dict[str, str], show_all: bool) -> Table:
    # One column less for most models: where all that is trained has the same state, the totals tell it.
    tells_state = len({_state_in_words(tensor) for tensor in tensors if tensor.kind == 'trained'}) > 1
    columns = ('name', 'shape', 'dtype', 'kind', *(('optimizer state',) if tells_state else ()), 'size')
    table = _table(*columns, right=('size',))
    names: dict[str, list[str]] = {}
    for name, original in tied.items():
        names.setdefault(original, []).append(name)
    rows: list[StoredTensor | None] = [*tensors]
    if len(tensors) > _FIRST + _LAST and not show_all:
        rows = [*tensors[:_FIRST], None, *tensors[-_LAST:]]
    for tensor in rows:
        if tensor is None:
            table.add_row('...')
            continue
        also = ''.join(f'\n= {name}' for name in names.get(tensor.name, ()))
        cells = (
            tensor.name + also,
            ' x '.join(str(size) for size in tensor.shape) or 'scalar',
            dtype_name(tensor.dtype),
            tensor.kind,
            *((_state_in_words(tensor),) if tells_state else ()),
            decimal(weights_bytes(tensor)),
        )
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _state_in_words(tensor: StoredTensor) -> str:
    if not tensor.state:
        return '-'
    return ', '.join(
        key if dtype == tensor.dtype else f'{key} ({dtype_name(dtype)})' for key, dtype in tensor.state.items()
    )


def _totals(findings: Findings) -> Iterable[tuple[str, str]]:
    totals = findings.totals()
    kinds = [kind for kind in ('trained', 'frozen', 'buffer', 'unknown') if kind in totals]
    for name in ('weights', *(kinds if len(kinds) > 1 else ()), 'optimizer state'):
        if name in totals:
            sums = totals[name]
            tensors = f'{sums["tensors"]:,} tensor{"s" if sums["tensors"] > 1 else ""}'
            words = f'{decimal(sums["size_bytes"])} in {tensors}, {sums["elements"]:,} elements'
            if name == 'optimizer state':
                keys = dict.fromkeys(key for tensor in findings.source.tensors.values() for key in tensor.state)
                words += f' ({", ".join(keys)})'
            yield f'  {name}' if name in kinds else name, words
    if findings.source.tied:
        count = len(findings.source.tied)
        yield 'tied', f'{count:,} further name{"s" if count > 1 else ""} of the same tensors'
    if 'optimizer state' not in totals:
        yield 'optimizer state', 'none'


def _verdict(findings: Findings) -> Iterable[Text]:
    if not findings.missing:
        yield Text('Complete.', style='green')
    else:
        yield Text('Not complete:', style='red')
        yield from (Text(f'- {one}', style='red') for one in findings.missing)
    if findings.damaged is None:
        yield Text('The checksums were not looked at.')
    elif findings.damaged:
        yield Text('Damaged:', style='red')
        yield from (Text(f'- {one}', style='red') for one in findings.damaged)
    else:
        where = ' in the other files' if findings.missing else ''
        yield Text(f'No damage{where}: whatever has a checksum matches it.', style='green')
