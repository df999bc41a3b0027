// Command gen writes encoders, decoders and tables of the messages in messages.schema, for Go and
// Python. Run by go generate in api/engine.
package main

import (
	"flag"
	"log"
	"os"
	"path/filepath"
)

func main() {
	log.SetFlags(0)
	root := flag.String("root", "../..", "the root of the repository")
	flag.Parse()
	files, err := generate(*root)
	if err != nil {
		log.Fatalf("gen: %v", err)
	}
	for path, text := range files {
		if err := os.WriteFile(filepath.Join(*root, path), text, 0o644); err != nil {
			log.Fatalf("gen: %v", err)
		}
	}
}

// generate returns the content of each generated file, by its path from the root.
func generate(root string) (map[string][]byte, error) {
	s, err := parse(filepath.Join(root, "api/engine/messages.schema"))
	if err != nil {
		return nil, err
	}
	out := map[string][]byte{}
	for _, f := range []struct {
		path string
		make func(*schema) ([]byte, error)
	}{
		{"connector/msg/zz_generated_types.go", goTypes},
		{"connector/msg/zz_generated_codec.go", goCodec},
		{"pybind/python/kvspray/_messages.py", python},
	} {
		if out[f.path], err = f.make(s); err != nil {
			return nil, err
		}
	}
	return out, nil
}
