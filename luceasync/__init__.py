"""luceasync, a local LLM server. ARCHITECTURE, below, is the map and the life of a request."""

__version__ = "0.1.0"

ARCHITECTURE = """
cli        commands; builds the Config         server     HTTP: bodies in, server-sent events out
text       strings <-> token ids               engine     requests on lanes, one step at a time
keeping    what is kept and taken up again     prefix     which prefix is kept where
nodefiles  nodes as files                      hoststore  host memory that holds nodes
dflash     drafts for the target to verify     pipeline   the model as a chain of groups
models     networks and their weights          kv         lanes: where their state lies
kernels    Triton, beside torch twins in models

Imports run downwards: cli -> server, engine -> keeping -> text, prefix, nodefiles, dflash ->
pipeline -> models, hoststore -> kv -> kernels.

1. server/openai  body -> schema -> Request; a wrong field is a 400 that names it
2. engine/prompts template -> text -> token ids; engine/admission: no place left is a 429
3. keeping/prefixes  what is known of the prompt, out of memory or from the disk, into a free lane
4. engine/pump    the rest of it chunk by chunk, decode steps of other lanes between
5. pipeline       tokens run through every shard; logits of the last row
6. engine/sampling the next token, drawn from the seed and the position alone
7. dflash/decode  several at a time: proposed, verified in one pass, accepted, committed
8. engine/generation  ids -> text (text/detokenizer) that is safe to show; stops, limits
9. server/openai  Delta -> event; the plain answer is a fold of the same events
10. client gone   the stream is closed, the pump frees the lane at the next step
11. afterwards    what the lane holds is kept; the next turn goes on from there
"""
