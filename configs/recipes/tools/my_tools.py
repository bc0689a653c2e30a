"""A vault whose numbers stand nowhere in the prompt: who does not look them up can only guess."""

import json


class Vault:
    def __init__(self, secrets_column="secrets"):
        self.secrets_column = secrets_column

    def reset(self, task, seed):
        """Open the vault of this row; no tool, as it belongs to the protocol."""
        secrets = task["fields"].get(self.secrets_column) or {}
        self.secrets = json.loads(secrets) if isinstance(secrets, str) else secrets

    def look_up(self, key: str) -> int:
        """Return the secret number that is kept under a key.

        Args:
            key: A word, as it stands in the question.
        """
        if key not in self.secrets:
            raise KeyError(f"nothing is kept under {key!r}")
        return self.secrets[key]
