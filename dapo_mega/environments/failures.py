"""What an environment raises where its trajectory cannot go on for reasons that are not the policy's."""


class EnvironmentFailure(Exception):
    """Raised by an environment or a tool whose server, sandbox or machine failed. It is never shown to the policy, and
    never a reward."""
