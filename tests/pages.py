"""The code on the pages: fenced blocks of the README and of docs/."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ['PAGES', 'ROOT', 'Block', 'blocks', 'commands']

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').rglob('*.md'))]


class Block(NamedTuple):
    """A fenced block."""

    page: str  # relative to the repository
    line: int
    language: str
    text: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """Read the blocks of a page in some languages."""
    text = page.read_text()
    found = re.finditer(r'^(`{3,})([\w{}-]*)\n(.*?)^\1$', text, re.MULTILINE | re.DOTALL)
    name = str(page.relative_to(ROOT))
    every = [Block(name, text.count('\n', 0, one.start()) + 2, one[2], one[3]) for one in found]
    return [one for one in every if one.language in languages]


def commands(block: Block) -> list[str]:
    """Split a block for a shell into its commands, without comments and with continued lines put together."""
    lines = re.sub(r'\\\n\s*', '', block.text).splitlines()
    bare = [re.sub(r'(^|\s{2,})#.*$', '', line).strip() for line in lines]
    return [line for line in bare if line]
