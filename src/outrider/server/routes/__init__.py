"""The routes: each file reads one kind of request, has it generated, and writes the answer in that kind's form."""
