"""How fast mixval trains, beside the limit of the machine and beside other libraries' loops."""
