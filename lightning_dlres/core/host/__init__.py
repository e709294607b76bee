"""Host: files, memory, locks and processes of the machine a process runs on."""
