"""The one error that is the user's to fix."""


class UserError(Exception):
    """Bad configuration or input. Each line of the message is one sentence that names the culprit and the remedy.

    The command line prints it without a traceback and exits with code 2; anything else that is raised is a defect and
    keeps its traceback.
    """
