"""Runs requests on lanes, one step at a time, in one thread. Does not know HTTP.

engine.py puts the event loop's side together, pump.py the thread's. A request passes through
prompts, prepare, admission, thread, pump, scheduler, lanes, steps, sampling, sequence (where ids
become text) and streams. start.py builds all of it from a Config.
"""
