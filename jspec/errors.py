"""The one exception for what a user can put right."""


class JspecError(ValueError):
    """A bad argument, a damaged file or an unknown name.

    The message is one line that names the thing and says what to do. The command line prints it
    alone; every other exception is a defect of ours and keeps its trace.
    """
