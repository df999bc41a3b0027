// Command ociimage writes an OCI image layout: a root file system as one layer, the kvspray binary
// as another. It needs no daemon and no registry. Equal input gives equal digests.
package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

type options struct {
	root, binary, arch, version, revision, out string
	epoch                                      int64
}

func main() {
	var o options
	flag.StringVar(&o.root, "root", "", "directory of the root file system")
	flag.StringVar(&o.binary, "binary", "", "the kvspray binary")
	flag.StringVar(&o.arch, "arch", "", "amd64 or arm64")
	flag.StringVar(&o.version, "version", "", "version, for the labels")
	flag.StringVar(&o.revision, "revision", "", "commit, for the labels")
	flag.StringVar(&o.out, "out", "", "directory to make")
	flag.Int64Var(&o.epoch, "epoch", 0, "time of every file, in seconds since 1970")
	flag.Parse()
	flag.VisitAll(func(f *flag.Flag) {
		if f.Value.String() == "" {
			fmt.Fprintf(os.Stderr, "ociimage: --%s is empty: %s\n", f.Name, f.Usage)
			os.Exit(2)
		}
	})
	if err := write(o); err != nil {
		fmt.Fprintf(os.Stderr, "ociimage: %v\n", err)
		os.Exit(1)
	}
}

func write(o options) error {
	when := time.Unix(o.epoch, 0).UTC()
	base, err := layer(when, func(t *tar.Writer) error { return tree(t, o.root, when) })
	if err != nil {
		return fmt.Errorf("%s: %w", o.root, err)
	}
	own, err := layer(when, func(t *tar.Writer) error {
		return file(t, o.binary, "usr/bin/kvspray", when)
	})
	if err != nil {
		return fmt.Errorf("%s: %w", o.binary, err)
	}
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1),
		types.OCIConfigJSON)
	if img, err = mutate.AppendLayers(img, base, own); err != nil {
		return err
	}
	old, err := img.ConfigFile()
	if err != nil {
		return err
	}
	c := old.DeepCopy()
	c.OS, c.Architecture, c.Created = "linux", o.arch, v1.Time{Time: when}
	c.Config = v1.Config{
		Entrypoint: []string{"/usr/bin/kvspray"},
		Cmd:        []string{"serve"},
		User:       "1000:1000",
		Env: []string{
			"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
			// The NVIDIA container runtime adds the driver's libraries of these capabilities.
			"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
		},
		Labels: map[string]string{
			"org.opencontainers.image.title":       "kvspray",
			"org.opencontainers.image.description": "Moves KV cache between LLM serving engines",
			"org.opencontainers.image.licenses":    "Apache-2.0",
			"org.opencontainers.image.source":      "https://github.com/kvspray/kvspray",
			"org.opencontainers.image.version":     o.version,
			"org.opencontainers.image.revision":    o.revision,
		},
	}
	if img, err = mutate.ConfigFile(img, c); err != nil {
		return err
	}
	path, err := layout.Write(o.out, empty.Index)
	if err != nil {
		return err
	}
	return path.AppendImage(img,
		layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": o.version}),
		layout.WithPlatform(v1.Platform{OS: "linux", Architecture: o.arch}))
}

func layer(when time.Time, fill func(*tar.Writer) error) (v1.Layer, error) {
	var b bytes.Buffer
	t := tar.NewWriter(&b)
	if err := errors.Join(fill(t), t.Close()); err != nil {
		return nil, err
	}
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(b.Bytes())), nil
	}, tarball.WithMediaType(types.OCILayer))
}

// tree adds a directory's content in lexical order.
func tree(t *tar.Writer, root string, when time.Time) error {
	return filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		name, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		return file(t, path, name, when)
	})
}

func file(t *tar.Writer, path, name string, when time.Time) error {
	st, err := os.Lstat(path)
	if err != nil {
		return err
	}
	var target string
	if st.Mode()&fs.ModeSymlink != 0 {
		if target, err = os.Readlink(path); err != nil {
			return err
		}
	}
	h, err := tar.FileInfoHeader(st, target)
	if err != nil {
		return err
	}
	h.Name, h.ModTime, h.AccessTime, h.ChangeTime = name, when, time.Time{}, time.Time{}
	h.Uid, h.Gid, h.Uname, h.Gname = 0, 0, "", ""
	if st.IsDir() {
		h.Name += "/"
	}
	if err := t.WriteHeader(h); err != nil || !st.Mode().IsRegular() {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(t, f)
	return errors.Join(err, f.Close())
}
