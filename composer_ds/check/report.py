"""Showing findings on a terminal or in a file."""

from __future__ import annotations

import re

from rich.console import Console, Group
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from composer_ds.check.findings import Findings, MemoryRow
from composer_ds.check.plot import terminal_plot
from composer_ds.ownership import Plan

__all__ = ['print_findings']

_KINDS = ('weights', 'gradients', 'optimizer', 'buffers')


def print_findings(findings: Findings, console: Console) -> None:
    """Print everything that was found.

    Args:
        findings (Findings): What was found.
        console (Console): Where to.
    """
    ranks = f'{findings.world_size} rank{"s" if findings.world_size > 1 else ""}'
    _section(console, f'{findings.title} on {ranks}', Text(findings.model) if findings.model else None)
    if findings.plan is not None and findings.plan.decisions:
        _section(console, 'Plan', _plan_table(findings.plan, findings, is_narrow=console.width < 110))
    _section(console, 'Batch', Text(findings.batch))
    if findings.memory:
        _section(console, 'Memory of each rank', _memory_table(findings.memory, findings), Text(_about(findings)))
    if findings.rates is not None and findings.rates.optimizer_steps:
        plot = terminal_plot(findings.rates, min(console.width, 100) - 2)
        _section(console, 'Learning rate', Text(plot, no_wrap=True))
    if findings.remarks:
        remarks = Table.grid(padding=(0, 1, 0, 0))
        for remark in findings.remarks:
            remarks.add_row('-', Text(remark))
        _section(console, 'Remarks', remarks)


def _section(console: Console, title: str, *parts: Table | Text | None) -> None:
    console.print(Text(title, style='bold'))
    console.print(Padding(Group(*(part for part in parts if part is not None)), (0, 0, 1, 2), expand=False))


def _plan_table(plan: Plan, findings: Findings, is_narrow: bool) -> Table:
    table = Table(box=None, header_style='underline', pad_edge=False)
    for name in ('setting', 'value', 'owner', 'from'):
        table.add_column(name, overflow='fold')
    for one in plan.decisions:
        source = 'ds_config' if one.source == f'ds_config.{one.setting}' else findings.origin_of(one.source)
        cells = (one.setting, str(one.value), one.owner, source)
        table.add_row(*(Text(_before_long_words(cell) if is_narrow else cell) for cell in cells))
    return table


def _before_long_words(text: str) -> str:
    """Break dotted paths between their parts rather than anywhere."""
    return re.sub(r'\.(?=\w{12})', '.\n', text)


def _memory_table(rows: list[MemoryRow], findings: Findings) -> Table:
    table = Table(box=None, header_style='underline', pad_edge=False)
    table.add_column('ZeRO', justify='right')
    table.add_column('offload', overflow='fold', min_width=10)
    for name in _KINDS:
        table.add_column(name, justify='right', no_wrap=True)
    for name in ('in all',) if findings.on_cpu else ('device', 'host'):
        table.add_column(name, justify='right', no_wrap=True, style='bold')
    for row in rows:
        cells = [f'> {row.zero_stage}' if row.is_chosen else str(row.zero_stage), ', '.join(row.offload) or '-']
        if row.memory is None:
            table.add_row(*cells, 'refused', style='dim')
            continue
        memory = row.memory
        sizes = [memory.device[kind] + memory.host[kind] for kind in _KINDS]
        sizes += [memory.total_bytes] if findings.on_cpu else [memory.device_bytes, memory.host_bytes]
        shown = (decimal(size) if size else '-' for size in sizes)
        table.add_row(*cells, *shown, style='green' if row.is_chosen else '')
    return table


def _about(findings: Findings) -> str:
    chosen = next((row.memory for row in findings.memory if row.is_chosen), None)
    sentences = [
        'At the fullest moment of an optimizer step with several microbatches; optimizer: fp32 master weights and '
        'state; buffers: of communication and offload. Activations are not counted, nor what the allocator loses.'
    ]
    if any(row.memory is None for row in findings.memory):
        sentences.append('refused: the other settings do not allow it.')
    if chosen is not None:
        sentences.append('> is what the file asks for.')
        if chosen.gathered_bytes:
            sentences.append(
                f'ZeRO 3 gathers weights besides while it computes, up to {decimal(chosen.gathered_bytes)}.'
            )
    if not findings.on_cpu:
        sentences.append('Host memory is for each rank: a machine with 8 ranks needs it 8 times.')
    return ' '.join(sentences)
