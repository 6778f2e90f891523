"""A W&B dashboard as code: the sections and panels of ``composer_ds.panels`` as a saved view of a project."""
