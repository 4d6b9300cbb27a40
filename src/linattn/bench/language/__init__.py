"""What the measures of language models share: the model, its sizes, rows that resume, processes, lines of a chart."""
