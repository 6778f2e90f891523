"""Time and memory of ``composer-ds consolidate``, against ``torch.save`` and DeepSpeed's ``zero_to_fp32``.

``python -m tests.benchmarks.consolidate``: every way runs in a fresh process that has imported what it needs.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import textwrap

from rich.console import Console
from rich.table import Table

from composer_ds.testing import RankPool
from tests.benchmarks import consolidate_cases

_OURS = ('from composer_ds.consolidate.command import consolidate; import torch.distributed.checkpoint', '')
_THEIRS = (
    'from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert, '
    'get_fp32_state_dict_from_zero_checkpoint as get; import torch',
    '',
)
_DTYPE = "dtype='bf16'"
WAYS: dict[str, tuple[tuple[str, str], str]] = {
    'torch.save of the weights': (
        ('import torch; from safetensors.torch import load_file', "weights = load_file(f'{folder}/reference')"),
        "torch.save(weights, f'{folder}/out.pt')",
    ),
    'consolidate sharded': (_OURS, "consolidate(f'{folder}/sharded', f'{folder}/out')"),
    'consolidate sharded, bf16': (_OURS, f"consolidate(f'{{folder}}/sharded', f'{{folder}}/out', {_DTYPE})"),
    'consolidate sharded, .pt': (_OURS, "consolidate(f'{folder}/sharded', f'{folder}/out.pt')"),
    "consolidate DeepSpeed's": (_OURS, "consolidate(f'{folder}/deepspeed', f'{folder}/out')"),
    'zero_to_fp32, safetensors': (
        _THEIRS,
        "convert(f'{folder}/deepspeed', f'{folder}/out', safe_serialization=True)",
    ),
    'zero_to_fp32, one .bin': (_THEIRS, "convert(f'{folder}/deepspeed', f'{folder}/out', max_shard_size=None)"),
    'zero_to_fp32, not lazy': (_THEIRS, "torch.save(get(f'{folder}/deepspeed'), f'{folder}/out.pt')"),
}


def measure(way: str, folder: str) -> tuple[float, float]:
    """Run one way in a fresh process, from a cold start but with the files in the page cache.

    Returns:
        tuple[float, float]: Seconds, and MiB beyond what the process held before.
    """
    (imports, setup), call = WAYS[way]
    code = f"""
        import os, pathlib, time
        {imports}
        folder = {folder!r}
        def memory(field):
            lines = pathlib.Path('/proc/self/status').read_text().splitlines()
            return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))
        {setup}
        pathlib.Path('/proc/self/clear_refs').write_text('5')
        before, start = memory('VmRSS'), time.perf_counter()
        {call}
        os.sync()
        print('measured', time.perf_counter() - start, memory('VmHWM') - before)
    """
    done = subprocess.run(
        [sys.executable, '-c', textwrap.dedent(code)], capture_output=True, text=True, timeout=600, check=False
    )
    shutil.rmtree(f'{folder}/out', ignore_errors=True)
    subprocess.run(['rm', '-f', f'{folder}/out.pt'], check=True)
    assert done.returncode == 0, done.stderr
    _, seconds, mib = done.stdout.splitlines()[-1].split()
    return float(seconds), float(mib)


def main() -> None:
    """Save a model with AdamW's state, consolidate it in every way, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--layers', type=int, default=12, help='square layers of the model (default: 12)')
    parser.add_argument('--width', type=int, default=2048, help='width of each (default: 2048)')
    parser.add_argument('--strategy', default='zero3', help='of tests/distributed/parity_cases.py (default: zero3)')
    parser.add_argument('--times', type=int, default=3, help='runs of each way, whose median counts (default: 3)')
    options = parser.parse_args()
    mib = options.layers * options.width**2 * 4 / 2**20
    with tempfile.TemporaryDirectory() as folder:
        with RankPool(2, timeout_sec=600) as pool:
            pool.run(consolidate_cases.save, folder, options.strategy, options.layers, options.width)
        code = f"""
            from composer_ds.consolidate.command import consolidate
            consolidate('{folder}/sharded', '{folder}/weights')
        """
        subprocess.run([sys.executable, '-c', textwrap.dedent(code)], check=True, timeout=600)
        shutil.move(f'{folder}/weights/model.safetensors', f'{folder}/reference')
        # In turn, because a disk is now fast and now slow.
        found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(options.times):
            for way in WAYS:
                found[way].append(measure(way, folder))
    title = f'AdamW, {options.strategy}, 2 ranks, {mib:.0f} MiB of fp32 weights in {options.layers} tensors'
    table = Table(title=title, title_justify='left')
    for column in ('way', 'time', 'of torch.save', 'memory beyond the start'):
        table.add_column(column, justify='left' if column == 'way' else 'right')
    base_sec = statistics.median(seconds for seconds, _ in found['torch.save of the weights'])
    for way, runs in found.items():
        seconds, memory = (statistics.median(values) for values in zip(*runs, strict=True))
        table.add_row(way, f'{seconds:.2f} s', f'{seconds / base_sec:.2f}', f'{memory:.0f} MiB')
    Console(width=120).print(table)


if __name__ == '__main__':
    main()
