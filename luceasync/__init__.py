"""luceasync, a local LLM server that prefills a prompt once. docs/architecture.md has the picture,
the lives of a request, an activation and a node, and the glossary.

cli           commands; builds the Config          server        HTTP; one package per API family
local         a model in this process, for Python
text          strings <-> token ids                grammar       constraints on answers, as masks
engine        requests on lanes, step by step      prefix_cache  saves and restores lanes' prefixes
prefix_tree   the index of prefixes (pure)         host_cache    nodes in host memory
disk_cache    nodes as files                       speculation   drafters, proposals, acceptance
pipeline      the model as a chain of stages       kv            pages and state of lanes
models        families, mixers, formats, weights   kernels       Triton and CUDA C++
ranking       candidates instead of logits         gguf          headers of GGUF files
ipc           channels between processes           backend       the program at the other end
bench         the measurements                     cuda, cyext   Numba kernels, Cython loops

Imports run downwards: cli, local -> server, engine -> prefix_cache -> text, prefix_tree,
disk_cache, host_cache; speculation -> pipeline -> models, host_cache -> kv -> kernels. request.py
and status.py are the values that server and engine exchange; config.py, options.py and parsers.py
are the settings; errors.py has the exceptions.
"""

__version__ = "0.1.0"
