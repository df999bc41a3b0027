// Package s3 is store/object's Bucket on an S3 API, over minio-go. Each call sends one request and
// returns its error in the terms of store/object: what only a person mends names the field and the
// remedy. It keeps no state but connections.
//
// minio-go was chosen over aws-sdk-go-v2 by size: a program of four calls with either grows by 1.6
// and by 4.2 MB over one with net/http, encoding/xml and encoding/json. Its credentials are looked
// for in the order of the SDK: environment, shared file (with credential_process), and the role of
// a service account, container or instance.
package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/kvspray/kvspray/internal/redact"
	"github.com/kvspray/kvspray/store/object"
	"github.com/minio/minio-go/v7"
	"github.com/minio/minio-go/v7/pkg/credentials"
)

// Config names a bucket. Credentials are not part of it.
type Config struct {
	Endpoint string // URL of the service; empty: AWS in the region
	Region   string // empty: AWS_REGION, or us-east-1
	Bucket   string
	Timeout  time.Duration // for the credentials of a role; 0: 5 s
}

// Bounds.
const (
	maxSmall    = 1 << 20 // what Load reads
	connections = 64      // idle ones that are kept
	readBuffer  = 64 << 10
)

type bucket struct {
	c         Config
	core      *minio.Core
	transport *http.Transport
	creds     *credentials.Credentials
}

// Open makes a Bucket. It sends nothing to the service.
func Open(c Config) (object.Bucket, error) {
	if c.Region == "" {
		c.Region = os.Getenv("AWS_REGION")
	}
	if c.Region == "" {
		c.Region = "us-east-1"
	}
	if c.Endpoint == "" {
		c.Endpoint = "https://s3." + c.Region + ".amazonaws.com"
	}
	if c.Timeout == 0 {
		c.Timeout = 5 * time.Second
	}
	u, err := url.Parse(c.Endpoint)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" ||
		u.User != nil ||
		u.Path != "" && u.Path != "/" {
		return nil, &object.ConfigError{Field: "endpoint", Value: redact.URL(c.Endpoint),
			Problem: "is no URL of a service", Remedy: "write https://HOST or http://HOST:PORT"}
	}
	if c.Bucket == "" {
		return nil, &object.ConfigError{Field: "bucket", Problem: "is empty",
			Remedy: "name a bucket that exists"}
	}
	transport, err := minio.DefaultTransport(u.Scheme == "https")
	if err != nil {
		return nil, err
	}
	transport.MaxIdleConnsPerHost, transport.ReadBufferSize = connections, readBuffer
	roles := &http.Client{Timeout: c.Timeout, Transport: transport}
	creds := credentials.NewChainCredentials([]credentials.Provider{&credentials.EnvAWS{},
		&credentials.FileAWSCredentials{}, &credentials.IAM{Client: roles, Region: c.Region}})
	core, err := minio.NewCore(u.Host, &minio.Options{Creds: creds, Region: c.Region,
		Secure: u.Scheme == "https", Transport: transport, TrailingHeaders: true, MaxRetries: 1})
	if err != nil {
		return nil, &object.ConfigError{Field: "endpoint", Value: c.Endpoint, Problem: err.Error(),
			Remedy: "write https://HOST or http://HOST:PORT"}
	}
	return &bucket{c, core, transport, creds}, nil
}

func (b *bucket) Close() { b.transport.CloseIdleConnections() }

func (b *bucket) Get(ctx context.Context, name string, off, n int64) (io.ReadCloser, error) {
	var o minio.GetObjectOptions
	if err := o.SetRange(off, off+n-1); err != nil {
		return nil, err
	}
	body, info, _, err := b.core.GetObject(ctx, b.c.Bucket, name, o)
	if err != nil {
		return nil, b.explain(err, "s3:GetObject", name)
	}
	if info.Size < n {
		_ = body.Close() // it is not read
		return nil, object.ErrShort
	}
	return &exact{body, n}, nil
}

// exact is a body of a known length.
type exact struct {
	io.ReadCloser
	left int64
}

func (e *exact) Read(p []byte) (int, error) {
	if e.left == 0 {
		return 0, io.EOF
	}
	n, err := e.ReadCloser.Read(p[:min(int64(len(p)), e.left)])
	e.left -= int64(n)
	if errors.Is(err, io.EOF) && e.left > 0 {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

func (b *bucket) Load(ctx context.Context, name string) (data []byte, tag string, err error) {
	body, info, _, err := b.core.GetObject(ctx, b.c.Bucket, name, minio.GetObjectOptions{})
	if err != nil {
		return nil, "", b.explain(err, "s3:GetObject", name)
	}
	defer func() { _ = body.Close() }() // what was read of it counts
	if info.Size > maxSmall {
		return nil, "", &object.ConfigError{Field: "prefix", Value: name, Problem: fmt.Sprintf(
			"an object of %d bytes, which no kvspray store wrote", info.Size),
			Remedy: "name another prefix"}
	}
	data = make([]byte, info.Size)
	if _, err := io.ReadFull(body, data); err != nil {
		return nil, "", err
	}
	return data, info.ETag, nil
}

func (b *bucket) Put(ctx context.Context, name string, data []byte,
	when object.Condition) (tag string, err error) {
	o := minio.PutObjectOptions{ContentType: "application/octet-stream"}
	if when.Absent {
		o.SetMatchETagExcept("*")
	} else if when.Tag != "" {
		o.SetMatchETag(when.Tag)
	}
	info, err := b.core.PutObject(ctx, b.c.Bucket, name, bytes.NewReader(data), int64(len(data)),
		"", "", o)
	if err != nil {
		return "", b.explain(err, "s3:PutObject", name)
	}
	return info.ETag, nil
}

func (b *bucket) List(ctx context.Context, prefix, after string,
	each func(string, int64) error) error {
	for o := range b.core.ListObjectsIter(ctx, b.c.Bucket, minio.ListObjectsOptions{Prefix: prefix,
		StartAfter: after, MaxKeys: object.ListPage, Recursive: true}) {
		if o.Err != nil {
			return b.explain(o.Err, "s3:ListBucket", prefix)
		}
		if err := each(o.Key, o.Size); err != nil {
			return err
		}
	}
	return ctx.Err()
}

func (b *bucket) Delete(ctx context.Context, name string) error {
	err := b.explain(b.core.RemoveObject(ctx, b.c.Bucket, name, minio.RemoveObjectOptions{}),
		"s3:DeleteObject", name)
	if errors.Is(err, object.ErrNotFound) {
		return nil
	}
	return err
}

// explain returns an error of the client in the terms of package object. right is what the request
// needs.
func (b *bucket) explain(err error, right, name string) error {
	if err == nil {
		return nil
	}
	r := minio.ToErrorResponse(err)
	mistake := func(field, value, problem, remedy string) error {
		return &object.ConfigError{Field: field, Value: value,
			Problem: fmt.Sprintf("%s (%s)", problem, r.Code), Remedy: remedy}
	}
	switch r.Code {
	case minio.NoSuchKey:
		return object.ErrNotFound
	case "InvalidRange":
		return object.ErrShort
	case minio.PreconditionFailed:
		return object.ErrChanged
	case minio.NoSuchBucket, "InvalidBucketName":
		return mistake("bucket", b.c.Bucket, "does not exist at "+b.c.Endpoint,
			"create it, or name another one; kvspray creates none")
	case minio.AccessDenied, "AllAccessDisabled":
		who := b.accessKey()
		if who == "" {
			return mistake("credentials", "", "none were found", "set AWS_ACCESS_KEY_ID and "+
				"AWS_SECRET_ACCESS_KEY, write ~/.aws/credentials, or give the host or service "+
				"account a role")
		}
		return mistake("credentials", who, "may not use "+right+" on "+b.c.Bucket+"/"+name,
			"allow s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject and "+
				"s3:DeleteObject on its objects")
	case "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken",
		"InvalidClientTokenId":
		return mistake("credentials", b.accessKey(), "are not valid at "+b.c.Endpoint, "renew them")
	case "RequestTimeTooSkewed", "RequestExpired":
		return mistake("clock", time.Now().UTC().Format(time.RFC3339), "the time of this host is "+
			"far from that of "+b.c.Endpoint, "set the clock of this host, for instance by NTP")
	case "AuthorizationHeaderMalformed", "PermanentRedirect", "InvalidRegion", "MovedPermanently":
		return mistake("region", b.c.Region, "is not the region of bucket "+b.c.Bucket,
			"set region to the bucket's")
	case "NotImplemented", "MethodNotAllowed":
		return mistake("endpoint", b.c.Endpoint, "does not do what "+right+" on "+name+" asks for",
			"use an object store with conditional writes (If-Match, If-None-Match)")
	}
	return fmt.Errorf("%s %s: %w", right, name, err)
}

// accessKey is the key id that requests are signed with, which is no secret.
func (b *bucket) accessKey() string {
	v, err := b.creds.GetWithContext(&credentials.CredContext{Client: &http.Client{
		Timeout: b.c.Timeout, Transport: b.transport}})
	if err != nil {
		return ""
	}
	return v.AccessKeyID
}
