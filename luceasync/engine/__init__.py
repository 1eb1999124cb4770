"""Requests on lanes: who runs next, one step at a time, in one thread. Knows no HTTP.

engine.py puts the event loop's side together, pump.py the thread's. The way of a request: prompts,
choices, admission, thread, pump, roster, steps, sampling, generation (where ids become text),
outbox, answers, stream. start.py builds all of it from a Config.
"""
