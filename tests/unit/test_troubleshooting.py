"""What docs/troubleshooting.md quotes is what the sources say, and the tests and variables that it names exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / 'docs/troubleshooting.md').read_text()
# Our messages stand in blocks of language text, each message in one block; `...` is what is left out.
MESSAGES = [' '.join(block.split()) for block in re.findall(r'^```text\n(.*?)^```$', PAGE, re.MULTILINE | re.DOTALL)]
# What stands for a value in a source: no text on the page has it.
_VALUE = '\0'


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else _VALUE
    if isinstance(node, ast.JoinedStr):
        return ''.join(_text(value) for value in node.values)
    return _VALUE


def _strings(source: str) -> list[str]:
    """Every string of a source, f-strings with their values left out, and no docstrings."""
    tree = ast.parse(source)
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Constant, ast.JoinedStr))]
    return [' '.join(_text(node).split()) for node in nodes if id(node) not in bare | parts]


STRINGS = [text for path in sorted((ROOT / 'composer_ds').rglob('*.py')) for text in _strings(path.read_text())]


def _fragments(message: str) -> list[str]:
    return [fragment.strip() for fragment in message.split('...') if fragment.strip()]


@pytest.mark.parametrize('message', MESSAGES, ids=lambda message: message[:40])
def test_messages_are_those_of_the_sources(message: str):
    fragments = _fragments(message)
    assert any(all(fragment in text for fragment in fragments) for text in STRINGS)
    assert sum(map(len, fragments)) >= 20, 'too short to be found in one place only'


def test_the_page_quotes_messages():
    assert len(MESSAGES) >= 20


def test_strings_are_put_together_and_docstrings_left_out():
    strings = _strings('"""A docstring."""\nraise ValueError(f"{name}: is "\n    f"not {other} " "there")\n')
    assert strings == [f'{_VALUE}: is not {_VALUE} there']


def test_named_tests_exist():
    named = re.findall(r'`(tests/[\w/]+\.py)::(\w+)`', PAGE)
    assert len(named) >= 10
    missing = [f'{file}::{name}' for file, name in named if f'def {name}(' not in (ROOT / file).read_text()]
    assert not missing
    # Tests named in any other way would not be looked at.
    assert len(re.findall(r'\btest_\w+(?!\w*\.py)\b(?!\.py)', PAGE)) == len(named)


def test_links_lead_somewhere():
    for page, anchor in re.findall(r'\]\(([\w/]+\.md)(?:#([\w-]+))?\)', PAGE):
        text = (ROOT / 'docs' / page).read_text()
        headings = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
        slugs = [re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings]
        assert not anchor or anchor in slugs, f'{page}#{anchor}'
