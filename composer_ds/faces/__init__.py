"""Faces: objects with the interfaces that Composer's Trainer knows, backed by the ``ds_engine``.

Composer keeps its own loop. It talks to ``state.model``, ``state.optimizers``, ``state.scaler`` and
``state.schedulers``; the :class:`~composer_ds.DeepSpeed` algorithm puts a face in place of each, and the rest of
Composer works unchanged.
"""

from composer_ds.faces.model import ModelFace, model_face
from composer_ds.faces.optimizer import OptimizerFace, optimizer_face
from composer_ds.faces.scaler import ScalerFace

__all__ = ['ModelFace', 'OptimizerFace', 'ScalerFace', 'model_face', 'optimizer_face']
