"""What every command needs: whole files, a description of the machine, checked options, and extras."""
