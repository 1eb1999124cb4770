"""What `quantization_config` of a Hugging Face checkpoint says, and how its tensors become our one
form. A file each way of storing; all pure at their tops.
"""
