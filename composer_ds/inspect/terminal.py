"""The command as the terminal sees it."""

from __future__ import annotations

import json

from rich.console import Console

from composer_ds.inspect.findings import bytes_to_verify, list_folder, look, verify
from composer_ds.inspect.report import print_findings, print_list
from composer_ds.progress import bytes_bar

__all__ = ['run']


def run(path: str, *, show_all: bool, reads: bool, as_json: bool, trusted: bool) -> bool:
    """Look at a checkpoint or a folder of them, and print what was found.

    Args:
        path (str): It.
        show_all (bool): Whether to list every tensor.
        reads (bool): Whether to compare everything with its checksums.
        as_json (bool): Whether to print JSON.
        trusted (bool): Whether to unpickle classes that are not harmless.

    Returns:
        bool: Whether everything is complete and undamaged; temporary files of a save do not count.

    Raises:
        CheckpointError: When there is no checkpoint, or it cannot be opened.
    """
    console = Console(highlight=False)
    listed = list_folder(path, trusted)
    if listed:
        if as_json:
            _print_json({'path': path, 'checkpoints': [one.as_json() for one in listed]})
        else:
            print_list(listed, path, console)
        return not any(one.problem for one in listed if not one.is_unfinished)
    findings = look(path, trusted)
    if reads:
        with bytes_bar('Reading everything') as bar:
            bar.begin(bytes_to_verify(findings.source))
            verify(findings, bar.advance)
    if as_json:
        _print_json(findings.as_json())
    else:
        print_findings(findings, console, show_all)
    return findings.is_good


def _print_json(content: object) -> None:
    # Facts may hold what JSON does not know, such as a version object.
    print(json.dumps(content, indent=1, default=str))
