"""The one exception whose message is written for the person at the command line."""


class UserError(ValueError):
    """A mistake in the configuration, the data or the command line.

    The message is one line: it names the thing that is wrong and the way out. Entry points print it
    without a traceback and exit with status 2; any other exception is a defect and keeps its traceback.
    """
