package cli

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvspray/kvspray/control/peer/keys"
	"github.com/kvspray/kvspray/internal/ui/command"
	"github.com/kvspray/kvspray/internal/ui/usage"
)

// Default lifetimes of certificates.
const (
	defaultCALife   = 10 * 365 * 24 * time.Hour
	defaultNodeLife = 2 * 365 * 24 * time.Hour
)

func keygenCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "keygen",
		Short: "Make keys and certificates for sidecars that listen off loopback",
		Long: `Makes the credentials by which sidecars authenticate each other. One of two kinds:

  a cluster key         one secret file for every sidecar; every holder of the file is a member
  certificates          an authority whose key stays off the nodes, and a certificate for each node

An existing file is never overwritten.`,
		Args: cobra.NoArgs,
		RunE: command.Help,
	}
	cmd.AddCommand(keygenCluster(), keygenCA(), keygenNode())
	return cmd
}

func keygenCluster() *cobra.Command {
	var out string
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Make a cluster key",
		Example: "  kvspray keygen cluster --out cluster.key\n  kvspray serve --set " +
			"peer.cluster_key_file=cluster.key --listen 10.0.0.1:7650 ...",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			c, err := keys.NewCluster()
			if err != nil {
				return err
			}
			if err := keys.WriteCluster(out, c); err != nil {
				return err
			}
			return done(cmd, "%s made; copy it to every sidecar, mode 0600, as peer.cluster_key_file", out)
		},
	}
	cmd.Flags().StringVar(&out, "out", "cluster.key", "file to write")
	return cmd
}

func keygenCA() *cobra.Command {
	var cert, key string
	var valid time.Duration
	cmd := &cobra.Command{
		Use:     "ca",
		Short:   "Make an authority that signs the certificates of one cluster",
		Example: "  kvspray keygen ca --cert ca.crt --key ca.key",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := lifetime(valid); err != nil {
				return err
			}
			if err := keys.WriteAuthority(cert, key, time.Now(), valid); err != nil {
				return err
			}
			return done(cmd, "%s made, for every sidecar as peer.tls.ca; keep %s off the nodes", cert, key)
		},
	}
	cmd.Flags().StringVar(&cert, "cert", "ca.crt", "file for the certificate")
	cmd.Flags().StringVar(&key, "key", "ca.key", "file for the private key")
	cmd.Flags().DurationVar(&valid, "valid", defaultCALife, "lifetime of the certificate")
	return cmd
}

func keygenNode() *cobra.Command {
	var caCert, caKey, cert, key, name string
	var hosts []string
	var valid time.Duration
	cmd := &cobra.Command{
		Use:     "node",
		Short:   "Issue the certificate of one node",
		Example: "  kvspray keygen node --name prefill-0 --host 10.0.0.1,prefill-0.example.org",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if name == "" || len(hosts) == 0 {
				return usage.Of(errors.New("--name and --host are required: the node's name, and every name " +
					"or address that peers dial"))
			}
			for _, h := range hosts {
				if err := keys.Host(h); err != nil {
					return usage.Of(fmt.Errorf("--host %w", err))
				}
			}
			if filepath.Base(name) != name {
				return usage.Of(fmt.Errorf("--name %q is not a plain name", name))
			}
			if err := lifetime(valid); err != nil {
				return err
			}
			if cert == "" {
				cert = name + ".crt"
			}
			if key == "" {
				key = name + ".key"
			}
			if err := keys.WriteNode(keys.NodeFiles{CACert: caCert, CAKey: caKey,
				Cert: cert, Key: key}, name, hosts, time.Now(), valid); err != nil {
				return err
			}
			return done(cmd, "%s and %s made, for peer.tls.cert and peer.tls.key of %s", cert, key, name)
		},
	}
	f := cmd.Flags()
	f.StringVar(&caCert, "ca", "ca.crt", "certificate of the authority")
	f.StringVar(&caKey, "ca-key", "ca.key", "private key of the authority")
	f.StringVar(&name, "name", "", "name of the node")
	f.StringSliceVar(&hosts, "host", nil, "names and addresses that peers dial; repeat or separate "+
		"by commas")
	f.StringVar(&cert, "cert", "", "file for the certificate (default NAME.crt)")
	f.StringVar(&key, "key", "", "file for the private key (default NAME.key)")
	f.DurationVar(&valid, "valid", defaultNodeLife, "lifetime; not beyond the authority's")
	return cmd
}

func lifetime(valid time.Duration) error {
	if valid < time.Minute {
		return usage.Of(fmt.Errorf("--valid %v is less than a minute", valid))
	}
	return nil
}

func done(cmd *cobra.Command, format string, args ...any) error {
	_, err := fmt.Fprintf(cmd.OutOrStdout(), format+"\n", args...)
	return err
}
