"""What is saved of prompts and answers, and restored. Does not know queues, and runs no model.

`cache` is the door, and decides what is restored and from where; `save_lane`, `write_back` and
`read_in` move nodes; `index` and `memory` hold them; `leases` decides which must stay.
"""
