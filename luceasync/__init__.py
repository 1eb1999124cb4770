"""luceasync, a local LLM server that prefills a prompt once. docs/architecture.md has the lives of
a request, of an activation and of a node, and the words.

cli        commands; builds the Config         server     HTTP; an API family each, as server/openai
text       strings <-> token ids               engine     requests on lanes, one step at a time
keeping    what is kept and taken up again     prefix     which prefix is kept where
nodefiles  nodes as files                      hoststore  host memory that holds nodes
dflash     drafts for the target to verify     pipeline   the model as a chain of groups
models     families, kinds of layers, weights  kv         lanes: where their state lies
kernels    Triton, beside torch twins          cuda       Numba kernels
cyext      compiled loops                      ipc        processes that work together
bench      how measurements are taken and told

Imports run downwards: cli -> server, engine -> keeping -> text, prefix, nodefiles, hoststore,
dflash -> pipeline -> models, hoststore -> kv -> kernels. request.py is what server and engine say
to each other; config.py, options.py and parsers.py are the settings; errors.py is what goes wrong.
"""

__version__ = "0.1.0"
