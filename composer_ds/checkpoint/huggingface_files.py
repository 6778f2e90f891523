"""What ``from_pretrained`` reads beside and in the weights of a running Hugging Face model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer.models import HuggingFaceModel

from composer_ds.consolidation import PendingTensorRead
from composer_ds.errors import CheckpointError

__all__ = ['HuggingFaceFiles']


@dataclass(frozen=True)
class HuggingFaceFiles:
    """A model of transformers, or of PEFT around one, and its tokenizer.

    Args:
        model (Any): ``PreTrainedModel`` or ``PeftModel``; under ZeRO 3 its parameters are empty.
        tokenizer (Any): The tokenizer; None when there is none.
        is_adapter (bool): Whether it is a PEFT model, of which only the active adapter is exported.
    """

    model: Any
    tokenizer: Any
    is_adapter: bool

    @classmethod
    def of(cls, model: Any) -> HuggingFaceFiles | None:
        """Find it in a Composer model.

        Args:
            model (Any): The user's model, or its face.

        Returns:
            HuggingFaceFiles | None: None when it is not a ``HuggingFaceModel`` of Composer.
        """
        if not isinstance(model, HuggingFaceModel):
            return None
        inner = model.model
        return cls(inner, model.tokenizer, is_adapter=bool(model.using_peft))

    @property
    def base_name(self) -> str:
        """How files of weights begin."""
        return 'adapter_model' if self.is_adapter else 'model'

    def names_to_write(self, tensors: Mapping[str, Any]) -> dict[str, str]:
        """Find which tensors are written, and under which names.

        Args:
            tensors (Mapping[str, Any]): All of the model, by name; tied ones under each, as the same object or in the
                same memory.

        Returns:
            dict[str, str]: Names to write, and those in ``tensors``. Of the names of a tied tensor, the one that
                ``from_pretrained`` expects is first.

        Raises:
            CheckpointError: When the adapter's tensors are computed from those of the model.
        """
        if self.is_adapter:
            return self._names_in_adapter(tensors)
        ignored = set(getattr(self.model, '_keys_to_ignore_on_save', None) or ())
        # transformers fills these from others of their names after it has read a file.
        tied = set(getattr(self.model, 'all_tied_weights_keys', None) or ())
        names = [name for name in tensors if name not in ignored]
        return {name: name for name in sorted(names, key=lambda name: name in tied)}

    def _names_in_adapter(self, tensors: Mapping[str, Any]) -> dict[str, str]:
        import peft

        adapter = self.model.active_adapter
        source_of = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
        try:
            found = peft.get_peft_model_state_dict(self.model, state_dict=dict(tensors), adapter_name=adapter)
            return {name: source_of[id(tensor)] for name, tensor in found.items()}
        except (PendingTensorRead, KeyError) as error:
            kind = self.model.peft_config[adapter].peft_type
            raise CheckpointError(
                f'PEFT computes what it saves of a {kind} adapter, and only adapters whose tensors are saved as they '
                'are can be exported while the model is partitioned. Save a checkpoint, and let PEFT save from that'
            ) from error

    def write(self, folder: Path, dtype: torch.dtype) -> None:
        """Write the configuration and the tokenizer. Called on rank 0.

        Args:
            folder (Path): Where the weights are.
            dtype (torch.dtype): Of the weights.
        """
        if self.is_adapter:
            self._write_adapter_config(folder)
        else:
            self._write_config(folder, dtype)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(folder)

    def _write_config(self, folder: Path, dtype: torch.dtype) -> None:
        """Write what ``PreTrainedModel.save_pretrained`` (transformers 5.24) does, with the live model untouched."""
        config = copy.deepcopy(self.model.config)
        config.dtype = str(dtype).removeprefix('torch.')
        config.architectures = [type(self.model).__name__]
        if getattr(self.model, '_auto_class', None) is not None:  # code that is not in transformers goes along
            from transformers.dynamic_module_utils import custom_object_save

            custom_object_save(self.model, folder, config=config)
        config.save_pretrained(folder)
        if self.model.can_generate() and self.model.generation_config is not None:
            self.model.generation_config.save_pretrained(folder)

    def _write_adapter_config(self, folder: Path) -> None:
        """Write what ``PeftModel.save_pretrained`` (peft 0.21) writes."""
        base = self.model.get_base_model()
        config = copy.deepcopy(self.model.peft_config[self.model.active_adapter])
        config.inference_mode = True
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = getattr(base, 'name_or_path', None) or None
        mapping = None
        if config.task_type is None:
            mapping = {'base_model_class': type(base).__name__, 'parent_library': type(base).__module__}
        config.save_pretrained(str(folder), auto_mapping_dict=mapping)
