"""Draws the pictures of these pages: ``python docs/pictures.py``. The numbers are computed by the package itself."""

from __future__ import annotations

from pathlib import Path

import torch
from composer.optim import CosineAnnealingWithWarmupScheduler
from matplotlib.figure import Figure

from composer_ds.learning_rate import RunLength, learning_rates
from composer_ds.memory import rank_memory
from composer_ds.memory_plan import MemoryPlan
from composer_ds.model_sizes import GroupSizes, ModelSizes

IMAGES = Path(__file__).parent / 'images'
OURS, COMPOSERS, ENGINES, TEXT = '#2f6fb2', '#6b7280', '#b45309', '#111827'


def draw_loop() -> None:
    """Draw Composer's loop from top to bottom, with its events at the left and what is done there at the right."""
    rows = [
        ('Trainer(...)', 'INIT', 'refuse what cannot be right', OURS),
        ('', 'BEFORE_LOAD', 'settle the plan, build the engine, put the faces in place', OURS),
        ('', 'AFTER_LOAD', 'load a sharded checkpoint; say from where the run goes on', OURS),
        ('fit', 'FIT_START', 'print the plan', OURS),
        ('    each batch', 'BEFORE_TRAIN_BATCH', "give all ranks rank 0's buffers", OURS),
        ('        each microbatch', 'BEFORE_FORWARD', 'model(batch) - ZeRO 3 gathers the weights', ENGINES),
        ('', '', 'loss.backward() - gradients are added up, reduced, partitioned', ENGINES),
        ('', 'AFTER_BACKWARD', 'note which parameters got a gradient', OURS),
        ('        optimizer.step()', '', 'reduce the rest, clip, update the partitions; or skip', ENGINES),
        ('', 'OPTIMIZER_STEP', 'callbacks hear of the update; counts move', OURS),
        ('        schedulers', '', 'new learning rates, from applied optimizer steps', COMPOSERS),
        ('        batch is counted', 'BATCH_END', 'loggers, evaluation, checkpoints', COMPOSERS),
        ('Trainer.close()', '', 'take the engine down', OURS),
    ]
    figure = Figure(figsize=(11, 5.6))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, 110)
    axes.set_ylim(len(rows) + 1.2, -0.8)
    for row, (where, event, what, color) in enumerate(rows):
        axes.text(2, row, where, va='center', fontsize=11, color=TEXT, family='monospace')
        axes.text(31, row, event, va='center', fontsize=10.5, color=TEXT, weight='bold')
        box = {'boxstyle': 'round,pad=0.35', 'facecolor': color, 'edgecolor': 'none', 'alpha': 0.16}
        axes.text(54, row, what, va='center', fontsize=11, color=color, bbox=box)
    for first, last, x in ((4, 11, 4.0), (5, 7, 7.5)):  # the loops
        axes.plot([x + 0.8, x, x], [last, last, first + 0.1], color=COMPOSERS, linewidth=1)
        axes.plot([x], [first + 0.1], marker='^', color=COMPOSERS, markersize=5)
    for x, text, color in ((31, 'Composer', COMPOSERS), (47, 'composer_ds', OURS), (65, 'DeepSpeed', ENGINES)):
        axes.text(x, len(rows) + 0.3, f'■ {text}', fontsize=11, color=color)
    _save(figure, 'loop')


def draw_memory() -> None:
    """Draw the memory of a rank by ZeRO stage, for a decoder of 6.7 billion parameters on 8 ranks in bf16."""
    width, inner, layers, words = 4096, 11008, 32, 32000
    layer = (width * width,) * 4 + (width * inner,) * 3 + (width,) * 2
    sizes = ModelSizes((GroupSizes((words * width, *layer * layers, width, words * width), 8),))
    places = [
        (1, False, False),
        (2, False, False),
        (2, True, False),
        (3, False, False),
        (3, True, False),
        (3, True, True),
    ]
    names, parts, hosts = [], [], []
    for stage, offload_optimizer, offload_param in places:
        plan = MemoryPlan(stage, 8, 'bf16', bool(offload_optimizer), bool(offload_param), communication='bf16')
        found = rank_memory(sizes, plan)
        offloads = ['optimizer'] * offload_optimizer + ['weights'] * offload_param
        names.append(f'ZeRO {stage}' + (f'\noffload\n{", ".join(offloads)}' if offloads else ''))
        parts.append(found.device)
        hosts.append(found.host_bytes)
    figure = Figure(figsize=(9, 4.2), layout='constrained')
    axes = figure.subplots()
    colors = {'weights': '#2f6fb2', 'gradients': '#b45309', 'optimizer': '#15803d', 'buffers': '#9ca3af'}
    bottom = [0.0] * len(parts)
    for kind, color in colors.items():
        heights = [part[kind] / 1e9 for part in parts]
        axes.bar(names, heights, bottom=bottom, label=kind, color=color, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for index, (top, host) in enumerate(zip(bottom, hosts, strict=True)):
        label = f'{top:.0f} GB' + (f'\n+ {host / 1e9:.0f} GB\nin host memory' if host else '')
        axes.text(index, top + 1, label, ha='center', va='bottom', fontsize=9)
    axes.set_ylabel('GB of device memory, without activations')
    axes.set_ylim(0, max(bottom) * 1.25)
    axes.legend(frameon=False)
    axes.spines[['top', 'right']].set_visible(False)
    _save(figure, 'memory')


def draw_learning_rate() -> None:
    """Draw one schedule, used with one batch in an optimizer step, with several, and with skipped ones."""
    scheduler = CosineAnnealingWithWarmupScheduler(t_warmup='0.1dur')
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    batches = 200

    def rates(batches_per_step: int) -> list[float]:
        length = RunLength(f'{batches}ba', batches_per_optimizer_step=batches_per_step)
        return learning_rates(scheduler, optimizer, length).groups[0]

    every, fourth = rates(1), rates(4)
    skipped = range(60, 90)
    steps = [batch - sum(one < batch for one in skipped) for batch in range(batches)]
    curves = {
        'one batch is one optimizer step': every,
        'four batches are one': [fourth[batch // 4] for batch in range(batches)],
        'batches 60 to 89 are skipped': [every[step] for step in steps],
    }
    figure = Figure(figsize=(9, 3.4), layout='constrained')
    axes = figure.subplots()
    for (label, values), color in zip(curves.items(), (OURS, ENGINES, '#15803d'), strict=True):
        axes.step(range(batches), values, where='post', label=label, color=color, linewidth=1.6)
    axes.axvspan(skipped[0], skipped[-1] + 1, color='#15803d', alpha=0.08, linewidth=0)
    axes.set_xlabel('batches')
    axes.set_ylabel('learning rate')
    axes.legend(frameon=False)
    axes.spines[['top', 'right']].set_visible(False)
    _save(figure, 'learning_rate')


def _save(figure: Figure, name: str) -> None:
    # Without a date, so that the same picture is the same file.
    figure.savefig(IMAGES / f'{name}.svg', metadata={'Date': None})


if __name__ == '__main__':
    draw_loop()
    draw_memory()
    draw_learning_rate()
