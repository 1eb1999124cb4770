"""What is kept of prompts and answers, and taken up again. Knows no queue and runs no model.

prefixes is the door; restore_decision says what is taken up, from where; lane_to_memory,
memory_to_disk and disk_to_memory move nodes; node_index and memory_nodes hold them.
"""
