"""What generates, as the rest of the package sees it: `protocol`. Nothing here knows prompts, rewards or groups."""
