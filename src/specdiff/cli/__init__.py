"""The command line: one thin file a command."""

import logging

# Where torchao is installed, importing it prints what it lacks for other machines through the user's text.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
