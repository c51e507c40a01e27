"""The `moesaic` command: one small file per subcommand."""
