"""A fleet of SGLang servers: their client, their membership and their launcher. All that speaks HTTP is here."""
