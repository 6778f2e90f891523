"""What Composer keeps of a Hugging Face model in its checkpoints, as files that ``from_pretrained`` reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from composer_ds.errors import CheckpointError

__all__ = ['HuggingFaceFiles']

_PREFIX = 'model.'


class HuggingFaceFiles:
    """The configuration and tokenizer of a checkpoint.

    Args:
        integrations (dict[str, Any]): What Composer saved under ``state``, ``integrations``, ``huggingface``.
    """

    def __init__(self, integrations: dict[str, Any]):
        model = integrations.get('model') or {}
        self.config: dict[str, Any] = dict((model.get('config') or {}).get('content') or {})
        self.peft_config: dict[str, Any] | None = (model.get('peft_config') or {}).get('content')
        self._tokenizer: dict[str, Any] = integrations.get('tokenizer') or {}

    @property
    def base_name(self) -> str:
        """How files of weights begin: as ``from_pretrained`` expects them."""
        return 'model' if self.peft_config is None else 'adapter_model'

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer."""
        return bool(self._tokenizer)

    def names(self, names: list[str]) -> dict[str, str]:
        """Find the names in the Hugging Face model; of a PEFT model only what its adapter has.

        Args:
            names (list[str]): Those of Composer's model.

        Returns:
            dict[str, str]: The names to write, and those of Composer's model.
        """
        found = {name.removeprefix(_PREFIX): name for name in names}
        if self.peft_config is None:
            return found
        # Composer's own choice of what belongs to an adapter: values pass through it untouched.
        import peft
        from composer.models.huggingface import filter_state_dict_peft

        return filter_state_dict_peft(found, peft.get_peft_config(dict(self.peft_config)))

    def write(self, folder: Path, dtype: torch.dtype | None) -> None:
        """Write the files.

        Args:
            folder (Path): Where to.
            dtype (torch.dtype | None): Of most weights, which the configuration names; None to leave it as it is.

        Raises:
            CheckpointError: When a name in the checkpoint would lead out of the folder.
        """
        if self.peft_config is not None:
            _write_json(folder / 'adapter_config.json', self.peft_config)
        elif self.config:
            config = dict(self.config)
            # The first since transformers 4.56, the second before.
            for key in ('dtype', 'torch_dtype'):
                if key in config and dtype is not None:
                    config[key] = str(dtype).removeprefix('torch.')
            _write_json(folder / 'config.json', config)
        for name, stored in self._tokenizer.items():
            extension, content = stored['file_extension'], stored['content']
            # Checkpoints of Composer before 0.16 have the name without its end.
            file = name if name.endswith(extension) else name + extension
            if Path(file).name != file:
                raise CheckpointError(
                    f'The checkpoint names a file of its tokenizer {file!r}; only a plain name is allowed'
                )
            if extension == '.json':
                _write_json(folder / file, content)
            elif extension == '.txt':
                (folder / file).write_text('\n'.join(content), encoding='utf-8')
            elif isinstance(content, bytes):  # a model of sentencepiece
                (folder / file).write_bytes(content)
            else:
                (folder / file).write_text(content, encoding='utf-8')


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, sort_keys=False) + '\n', encoding='utf-8')
