"""What refuses a command: each module the rules of one subject. `validation.find_problems` asks them all."""
