"""The `doctor` command: a server's command and the machine under it, judged before anything is started."""
