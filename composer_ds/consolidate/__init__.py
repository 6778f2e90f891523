"""What `composer-ds consolidate` does: one folder of safetensors, or one file, from a checkpoint of any format.

`weights` decides what is written under which name, `huggingface` what stands beside it, `output` makes it appear
complete or not at all, `torch_file` writes ``.pt`` files, and `command` streams the elements from one to the other.
"""
