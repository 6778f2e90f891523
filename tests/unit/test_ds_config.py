"""Reading a ds_config; json and yaml of the standard tools write the files."""

from __future__ import annotations

import json
import pickle

import pytest
import yaml

from composer_ds.ds_config import read_ds_config
from composer_ds.errors import ConfigError

CONFIG = {'gradient_clipping': 1.0, 'zero_optimization': {'stage': 2, 'reduce_bucket_size': 5e8}}


def test_a_dict_is_copied():
    copy = read_ds_config(CONFIG)
    assert copy == CONFIG and copy is not CONFIG
    copy['zero_optimization']['stage'] = 3
    assert CONFIG['zero_optimization']['stage'] == 2
    assert read_ds_config(None) == {}


@pytest.mark.parametrize('indent', [None, 4, '\t'])
def test_json(tmp_path, indent):
    (tmp_path / 'ds.json').write_text(json.dumps(CONFIG, indent=indent))
    assert read_ds_config(tmp_path / 'ds.json') == CONFIG
    assert read_ds_config(str(tmp_path / 'ds.json')) == CONFIG


def test_yaml(tmp_path):
    (tmp_path / 'ds.yaml').write_text(yaml.safe_dump(CONFIG))
    assert read_ds_config(tmp_path / 'ds.yaml') == CONFIG


@pytest.mark.parametrize('text', ['{"reduce_bucket_size": 5e8,\n\t"a": {}}', 'reduce_bucket_size: 5e8\na: {}'])
def test_numbers_are_numbers(tmp_path, text: str):
    (tmp_path / 'ds').write_text(text)
    assert read_ds_config(tmp_path / 'ds') == {'reduce_bucket_size': 500_000_000.0, 'a': {}}


@pytest.mark.parametrize(('text', 'word'), [('{"a": [1, }', 'does not parse'), ('- 1\n- 2', 'list'), ('', 'NoneType')])
def test_files_that_hold_no_settings(tmp_path, text: str, word: str):
    (tmp_path / 'ds.json').write_text(text)
    with pytest.raises(ConfigError, match=word):
        read_ds_config(tmp_path / 'ds.json')


def test_other_sources():
    with pytest.raises(ConfigError, match='no such file'):
        read_ds_config('not/there.json')
    with pytest.raises(ConfigError, match='int'):
        read_ds_config(3)  # pyright: ignore[reportArgumentType]


def test_errors_travel_between_processes():
    error = pickle.loads(pickle.dumps(ConfigError(['one', 'two'])))
    assert error.problems == ['one', 'two'] and '2 problems' in str(error)
